from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from arriero.cli.progress import Progress
from tests.cli.conftest import Run
from tests.helpers.fake_server import FakeServer

DIGEST = "sha256:" + "ab" * 32
PULL = [
    {"status": "pulling manifest"},
    {"status": "pulling abababababab", "digest": DIGEST, "total": 1000, "completed": 0},
    {"status": "pulling abababababab", "digest": DIGEST, "total": 1000, "completed": 40},
    {"status": "pulling abababababab", "digest": DIGEST, "total": 1000, "completed": 560},
    {"status": "pulling abababababab", "digest": DIGEST, "total": 1000, "completed": 1000},
    {"status": "writing manifest"},
    {"status": "success"},
]


@contextmanager
def dying(body: bytes) -> Iterator[int]:
    """The port of a server that answers every request with the beginning of a reply in chunks, and hangs up."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n"
    alive = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"

    def answer() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                asked = connection.recv(1 << 16)
                while asked.startswith(b"POST") and not asked.rstrip().endswith(b"}"):
                    asked += connection.recv(1 << 16)
                connection.sendall(head + body if asked.startswith(b"POST") else alive)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(5)


def test_pull_without_a_terminal_writes_plain_lines(arriero: Run, server: FakeServer) -> None:
    server.replies["POST", "/api/pull"] = lambda _: (200, PULL)
    result = arriero("pull", "hf.co/a/b:Q8_0", "--insecure")
    assert result.returncode == 0
    assert result.stdout == ""
    assert "\x1b" not in result.stderr
    assert "\r" not in result.stderr
    assert result.stderr.splitlines() == [
        "pulling manifest",
        "pulling abababababab",
        "writing manifest",
        "success",
    ]
    assert server.bodies("/api/pull") == [{"model": "hf.co/a/b:Q8_0", "insecure": True}]


def test_an_error_in_the_middle_of_a_pull_is_an_exit_of_1(arriero: Run, server: FakeServer) -> None:
    server.replies["POST", "/api/pull"] = lambda _: (200, [PULL[0], {"error": "digest mismatch"}])
    result = arriero("pull", "a")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == "Error: digest mismatch"


@pytest.mark.parametrize("verb", [["pull", "a"], ["push", "a"], ["verify"]])
@pytest.mark.parametrize(
    "rest", [b"", b"2b\r\n", b'2b\r\n{"status":', b'2b\r\n{"status":"pulling manifest but not all"}']
)
def test_a_server_that_dies_in_the_middle_is_an_error(arriero: Run, verb: list[str], rest: bytes) -> None:
    with dying(b'16\r\n{"status":"beginning"}\r\n' + rest) as port:
        result = arriero(*verb, ARRIERO_HOST=f"127.0.0.1:{port}")
    assert result.returncode == 1
    assert "the server closed the connection in the middle of a reply" in result.stderr.splitlines()[-1]
    assert result.stdout == ""


def test_statuses_that_end_without_success_are_an_error(arriero: Run, server: FakeServer) -> None:
    server.replies["POST", "/api/pull"] = lambda _: (200, PULL[:-1])
    result = arriero("pull", "a")
    assert result.returncode == 1
    assert "ended its reply after 'writing manifest', before it was done" in result.stderr.splitlines()[-1]


def test_push_shows_its_steps(arriero: Run, server: FakeServer) -> None:
    server.replies["POST", "/api/push"] = lambda _: (200, [{"status": "pushing manifest"}, {"status": "success"}])
    result = arriero("push", "me/m")
    assert result.returncode == 0
    assert result.stderr.splitlines() == ["pushing manifest", "success"]
    assert result.stdout.endswith("https://ollama.com/me/m\n")
    assert server.bodies("/api/push") == [{"model": "me/m", "insecure": False}]


def test_verify_prints_problems_and_exits_with_1(arriero: Run, server: FakeServer) -> None:
    server.replies["POST", "/api/verify"] = lambda _: (
        200,
        [{"status": "bad blob", "problem": "bad blob"}, {"status": "1 problem"}],
    )
    result = arriero("verify")
    assert (result.returncode, result.stdout) == (1, "bad blob\n")
    assert server.bodies("/api/verify") == [{"model": "", "repair": False}]


def test_verify_of_a_sound_model_says_so(arriero: Run, server: FakeServer) -> None:
    server.replies["POST", "/api/verify"] = lambda _: (200, [{"status": "success"}])
    result = arriero("verify", "m", "--repair")
    assert (result.returncode, result.stdout) == (0, "m: no problems\n")
    assert server.bodies("/api/verify") == [{"model": "m", "repair": True}]


def test_run_pulls_a_model_that_is_not_there(arriero: Run, server: FakeServer) -> None:
    pulled: list[Any] = []
    show = server.replies["POST", "/api/show"]
    server.replies["POST", "/api/show"] = lambda body: show(body) if pulled else (404, {"error": "not found"})

    def pull(body: dict[str, Any]) -> tuple[int, Any]:
        pulled.append(body)
        return 200, PULL

    server.replies["POST", "/api/pull"] = pull
    result = arriero("run", "m", "Hi")
    assert (result.returncode, result.stdout.strip()) == (0, "Hello world.")
    assert "pulling manifest" in result.stderr


def test_a_terminal_shows_a_bar_for_each_layer_and_one_for_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    with Progress() as progress:
        progress.show("pulling manifest")
        for done in (500, 1000):
            progress.show("pulling aaaaaaaaaaaa", done, 1000)
            progress.show("pulling bbbbbbbbbbbb", done, 3000)
        assert progress._live.tasks[progress._tasks["total"]].completed == 2000
        assert progress._live.tasks[progress._tasks["total"]].total == 4000
    shown = capsys.readouterr().err
    for word in ("✓ pulling manifest", "pulling aaaaaaaaaaaa", "pulling bbbbbbbbbbbb", "total", "2.0/4.0 kB"):
        assert word in shown
    # A step without bytes has a mark and no bar.
    assert "1/1" not in shown


def test_plain_lines_tell_speed_and_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([100.0, 100.0, 102.0, 110.0, 120.0])
    monkeypatch.setattr("arriero.cli.progress.time.monotonic", lambda: next(clock))
    with Progress() as progress:
        progress.show("pulling a", 0, 10_000_000)
        progress.show("pulling a", 1_000_000, 10_000_000)
        progress.show("pulling a", 5_000_000, 10_000_000)
        progress.show("pulling a", 5_100_000, 10_000_000)
    assert capsys.readouterr().err.splitlines() == [
        "pulling a",
        "pulling a: 50% of 10 MB, 500 KB/s, 10 seconds left",
    ]
