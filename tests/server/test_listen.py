"""What the server says when its address is taken, and how it ends."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest

from arriero.errors import ArrieroError
from arriero.server.listen import AddressInUse, bind, who_answers


@pytest.fixture
def answering():
    """A function that serves a text with a Server header and gives the port."""
    servers = []

    def start(text: str, name: str) -> int:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.end_headers()
                self.wfile.write(text.encode())

            def version_string(self):
                return name

            def log_message(self, *_):
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return server.server_address[1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("text", "name", "who"),
    [
        ("Ollama is running", "x", "Ollama"),
        ("Ollama is running", "arriero/0.1.0", "arriero"),
        ("hello", "x", "another HTTP server"),
    ],
)
def test_a_taken_port_says_who_has_it_and_how_to_choose_another(answering, text, name, who):
    port = answering(text, name)
    assert who_answers("127.0.0.1", port) == who
    with pytest.raises(AddressInUse, match=rf"{who}.*ARRIERO_HOST=127.0.0.1:{port + 1}"):
        bind("127.0.0.1", port)


def test_a_port_that_does_not_speak_http_is_another_program():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def hang_up():
            with contextlib.suppress(OSError):  # the end of the test closes the listener
                for _ in range(2):
                    listener.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        with pytest.raises(AddressInUse, match="another program"):
            bind("127.0.0.1", port)


def test_an_address_that_is_not_ours_is_said_so():
    with pytest.raises(ArrieroError, match=r"cannot listen on 192\.0\.2\.1"):
        bind("192.0.2.1", 0)
    with pytest.raises(ArrieroError, match="ARRIERO_HOST"):
        bind("no.such.host.invalid", 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_cleanly(tmp_path, number):
    with bind("127.0.0.1", 0) as probe:
        port = probe.getsockname()[1]
    environ = {"PATH": os.environ["PATH"], "ARRIERO_HOME": str(tmp_path), "ARRIERO_HOST": f"127.0.0.1:{port}"}
    environ["OLLAMA_MODELS"] = str(tmp_path / "none")
    code = "from arriero.server.app import serve; from arriero.settings import Settings; serve(Settings.from_environ())"
    process = subprocess.Popen([sys.executable, "-c", code], env=environ, stderr=subprocess.PIPE, text=True)
    with process:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                assert httpx.get(f"http://127.0.0.1:{port}/", trust_env=False).text == "Ollama is running"
                break
            except httpx.ConnectError:
                time.sleep(0.05)
        process.send_signal(number)
        _, log = process.communicate(timeout=10)
    assert process.returncode == 0, log
    assert f"listens on http://127.0.0.1:{port}" in log
    assert "GET / 200" in log
    assert "Traceback" not in log


def test_the_server_process_imports_no_mlx():
    code = "import sys, arriero.server.app; sys.exit(any(name.split('.')[0] == 'mlx' for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
