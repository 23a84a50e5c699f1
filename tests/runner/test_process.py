"""A runner process by itself, spoken to over a bare socket: how it starts and all the ways in which it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq

from arriero.runner.messages import (
    Finished,
    Loading,
    Ready,
    RunnerConfig,
    SamplingOptions,
    Shutdown,
    Status,
    StatusRequest,
    Submit,
    Tokens,
    decode_from_runner,
    encode,
)
from tests.helpers.tiny_runner import tiny_command, tiny_source

SECONDS = 20


class Server:
    """The other end of one runner."""

    def __init__(self, folder: Path, by_argument: bool = False, **model: Any) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, SECONDS * 1000)
        endpoint = f"ipc://{folder}/s"
        self.socket.bind(endpoint)
        config = msgspec.json.encode(RunnerConfig(source=tiny_source(folder, **model), endpoint=endpoint)).decode()
        arguments = [*tiny_command(), config if by_argument else "-"]
        self.process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdin is not None
        self.process.stdin.write("" if by_argument else config)
        self.process.stdin.close()
        self.heard: list[Any] = []

    def send(self, message: Any) -> None:
        self.socket.send(encode(message))

    def until(self, kind: type) -> Any:
        """Receive until a message of a kind has come."""
        while True:
            for frame in self.socket.recv_multipart():
                self.heard.append(decode_from_runner(frame))
            for message in self.heard:
                if isinstance(message, kind):
                    return message

    def ended(self) -> int:
        return self.process.wait(SECONDS)

    def close(self) -> None:
        self.socket.close()
        self.context.term()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    made.close()


def test_a_load_reports_progress_up_to_the_weights_and_then_ready(server):
    ready = server.until(Ready)
    loading = [message for message in server.heard if isinstance(message, Loading)]
    stages = list(dict.fromkeys(message.stage for message in loading))
    assert stages == ["opening", "weights", "warm-up"]
    assert loading[-1].done == loading[-1].total == ready.weight_bytes > 0
    assert ready.context_length == 2048


def test_the_configuration_may_be_the_argument(tmp_path):
    server = Server(tmp_path, by_argument=True)
    try:
        assert server.until(Ready).architecture == "tiny"
    finally:
        server.close()


def test_the_configuration_is_read_whatever_the_locale(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    folder = tmp_path / "ñandú"
    folder.mkdir()
    server = Server(folder)
    try:
        assert server.until(Ready).architecture == "tiny"
    finally:
        server.close()


def test_a_request_is_answered_and_shutdown_ends_the_process(server):
    server.until(Ready)
    server.send(Submit(id="1", tokens=[1, 2], max_tokens=5, stop_tokens=[], sampling=SamplingOptions(seed=1)))
    assert server.until(Finished).generated_tokens == 5
    server.send(Shutdown())
    assert server.ended() == 0


def test_rows_in_flight_end_as_cancelled_at_shutdown(server):
    server.until(Ready)
    server.send(Submit(id="1", tokens=[1, 2], max_tokens=1500, stop_tokens=[], sampling=SamplingOptions(seed=1)))
    server.until(Tokens)
    server.send(Shutdown())
    assert server.until(Finished).reason == "cancelled"
    assert server.ended() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_cleanly(server, number):
    server.until(Ready)
    server.process.send_signal(number)
    assert server.ended() == 0


def test_a_closed_channel_ends_it(server):
    server.until(Ready)
    server.socket.close()
    assert server.ended() == 0


def test_a_closed_channel_ends_it_even_inside_an_endless_forward(tmp_path):
    server = Server(tmp_path, seconds=60.0, grace=0.3)
    try:
        server.until(Ready)
        server.send(Submit(id="1", tokens=[1, 2], max_tokens=5, stop_tokens=[], sampling=SamplingOptions()))
        time.sleep(0.3)
        server.socket.close()
        assert server.ended() == 1
    finally:
        server.close()


def test_a_message_that_cannot_be_read_is_dropped(server):
    server.until(Ready)
    server.socket.send(b"\xc1nonsense")
    server.send(StatusRequest("s"))
    assert server.until(Status).id == "s"


def test_it_dies_with_its_parent(tmp_path):
    program = textwrap.dedent(
        f"""
        import sys
        from pathlib import Path
        from tests.runner.test_process import Server, Ready
        server = Server(Path({str(tmp_path)!r}))
        server.until(Ready)
        print(server.process.pid, flush=True)
        server.process.wait()
        """
    )
    root = Path(__file__).parents[2]
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=root, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    runner = psutil.Process(int(parent.stdout.readline()))
    assert runner.is_running()
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    gone, _ = psutil.wait_procs([runner], timeout=SECONDS)
    assert gone


def test_the_message_thread_imports_no_array_library():
    program = "import sys, arriero.runner.channel; sys.exit('mlx.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
