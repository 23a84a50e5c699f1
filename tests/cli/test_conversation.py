"""The conversation on a real pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator

import pytest

from arriero.cli.chat.reader import Block
from tests.helpers.fake_server import FakeServer, chat_reply


class Chat:
    """`arriero run tiny` with its input and output on a pseudo-terminal (stdout may be a pipe)."""

    def __init__(self, environ: dict[str, str], piped_output: bool = False) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "arriero", "run", "tiny"],
            stdin=slave,
            stdout=subprocess.PIPE if piped_output else slave,
            stderr=slave,
            env={**environ, "COLUMNS": "80", "LINES": "24"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # else Ctrl-C would be no signal
        )
        os.close(slave)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, text: str, seconds: float = 20) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.shown:
            assert time.monotonic() < deadline, f"{text!r} never came; the screen was {self.shown!r}"
            self._read(0.1)

    def _read(self, seconds: float) -> None:
        ready, _, _ = select.select([self._master], [], [], seconds)
        if ready:
            try:
                data = os.read(self._master, 65536).decode("utf-8", "replace")
            except OSError:  # the other end is closed
                return
            if "\x1b[6n" in data:  # the prompt asks where the cursor is, as it would ask a terminal
                os.write(self._master, b"\x1b[1;1R")
            self.shown += data

    def forget(self) -> None:
        self.shown = ""

    def end(self) -> int:
        deadline = time.monotonic() + 20
        while self.process.poll() is None and time.monotonic() < deadline:
            self._read(0.05)
        return self.process.wait(1)

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        os.close(self._master)


@pytest.fixture
def chat(environ: dict[str, str]) -> Iterator[Callable[..., Chat]]:
    opened: list[Chat] = []

    def open_chat(**options: bool) -> Chat:
        opened.append(Chat(environ, **options))
        opened[-1].wait_for(">>> ")
        return opened[-1]

    yield open_chat
    for each in opened:
        each.close()


def contents(server: FakeServer) -> list[str]:
    return [body["messages"][-1]["content"] for body in server.bodies("/api/chat")]


def test_a_message_is_answered_and_ctrl_d_leaves(chat: Callable[..., Chat], server: FakeServer) -> None:
    terminal = chat()
    terminal.type("hi\r")
    terminal.wait_for("world.")
    terminal.type("\x04")
    assert terminal.end() == 0
    assert contents(server) == ["hi"]


def test_a_block_in_triple_quotes_shows_the_other_prompt_and_ends(
    chat: Callable[..., Chat], server: FakeServer
) -> None:
    terminal = chat()
    terminal.type('"""a\r')
    terminal.wait_for("... ")
    terminal.type("\r")
    terminal.type('b"""\r')
    terminal.wait_for("world.")
    assert contents(server) == ["a\n\nb"]


def test_a_pasted_text_is_one_message(chat: Callable[..., Chat], server: FakeServer) -> None:
    terminal = chat()
    lines = "\n".join(f"line {i}" for i in range(200))
    terminal.type(f"\x1b[200~{lines}\x1b[201~")
    terminal.type("\r")
    terminal.wait_for("world.")
    assert contents(server) == [lines]


def test_ctrl_c_drops_a_block_and_the_session_lives(chat: Callable[..., Chat], server: FakeServer) -> None:
    terminal = chat()
    terminal.type('"""half\r')
    terminal.wait_for("... ")
    terminal.type("\x03")
    terminal.forget()
    terminal.wait_for(">>> ")
    terminal.type("whole\r")
    terminal.wait_for("world.")
    assert contents(server) == ["whole"]


def test_ctrl_c_on_an_empty_line_says_how_to_leave(chat: Callable[..., Chat]) -> None:
    terminal = chat()
    terminal.type("\x03")
    terminal.wait_for("Use Ctrl + d or /bye to exit.")


def test_a_server_error_leaves_the_conversation_open(chat: Callable[..., Chat], server: FakeServer) -> None:
    terminal = chat()
    server.replies["POST", "/api/chat"] = lambda _: (500, {"error": "it broke"})
    terminal.type("one\r")
    terminal.wait_for("Error: it broke")
    server.replies["POST", "/api/chat"] = lambda _: (200, chat_reply("better"))
    terminal.type("two\r")
    terminal.wait_for("better")


def test_a_piped_output_still_prompts_and_holds_replies_only(chat: Callable[..., Chat], server: FakeServer) -> None:
    terminal = chat(piped_output=True)
    terminal.type("hi\r")
    deadline = time.monotonic() + 20
    while not contents(server) and time.monotonic() < deadline:
        terminal._read(0.05)
    terminal.type("/bye\r")
    assert terminal.end() == 0
    assert terminal.process.stdout is not None
    assert terminal.process.stdout.read().decode() == "Hello world.\n"


def test_quotes_may_open_and_close_on_one_line() -> None:
    block = Block()
    assert block.feed('"""one line"""') == "one line"
    assert not block.open


def test_quotes_in_the_middle_of_a_line_are_text() -> None:
    assert Block().feed('say """hi""" now') == 'say """hi""" now'
