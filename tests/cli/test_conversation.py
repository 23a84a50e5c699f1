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
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from arriero.cli.chat.reader import Block
from tests.helpers.fake_server import FakeServer, chat_reply


def own_terminal() -> None:
    """Ctrl-C is a signal for a new process, also where the tests themselves run in the background and ignore it."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


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
            preexec_fn=own_terminal,
        )
        os.close(slave)
        self.shown = ""

    def type(self, text: str) -> None:
        data = text.encode()
        while data:
            data = data[os.write(self._master, data[:2000]) :]

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


class Slow(list):
    """Chunks of which the second comes only when `go` is set."""

    def __init__(self) -> None:
        super().__init__([1])
        self.go = threading.Event()

    def __iter__(self) -> Iterator[object]:
        yield from chat_reply("part ")[:1]
        self.go.wait(20)
        yield from chat_reply("late")


def test_ctrl_c_ends_the_reply_and_keeps_what_had_come(chat: Callable[..., Chat], server: FakeServer) -> None:
    """F09"""
    terminal = chat()
    chunks = Slow()
    server.replies["POST", "/api/chat"] = lambda _: (200, chunks)
    terminal.type("go\r")
    terminal.wait_for("part ")
    terminal.forget()
    terminal.type("\x03")
    terminal.wait_for(">>> ")
    chunks.go.set()
    server.replies["POST", "/api/chat"] = lambda _: (200, chat_reply("fine"))
    terminal.type("next\r")
    terminal.wait_for("fine")
    said = [(m["role"], m["content"]) for m in server.bodies("/api/chat")[-1]["messages"]]
    assert said == [("user", "go"), ("assistant", "part "), ("user", "next")]


def test_ctrl_c_ends_a_command_and_not_the_conversation(chat: Callable[..., Chat], server: FakeServer) -> None:
    """F09"""
    terminal = chat()
    loads = threading.Event()
    server.replies["POST", "/api/generate"] = lambda _: (200, {"waited": loads.wait(20)})
    terminal.type("/load other\r")
    terminal.wait_for("Loading model")
    terminal.forget()
    terminal.type("\x03")
    terminal.wait_for(">>> ")
    loads.set()
    terminal.type("hi\r")
    terminal.wait_for("world.")
    assert server.bodies("/api/chat")[-1]["model"] == "tiny"


@pytest.mark.parametrize(
    ("typed", "sent"),
    [
        ("a\x1b\rb", "a\nb"),
        ("a\nb", "a\nb"),
        ("x👩\u200d👩\u200d👧\x7fy", "xy"),
        ("🇨🇿\x7fe\u0301\x7fz", "z"),
        ("漢字\x7f!", "漢!"),
    ],
)
def test_keys_edit_whole_characters_and_lines(
    chat: Callable[..., Chat], server: FakeServer, typed: str, sent: str
) -> None:
    """F09: Alt-Enter and Ctrl-J begin a line; backspace takes what one sees as a character."""
    terminal = chat()
    terminal.type(f"{typed}\r")
    terminal.wait_for("world.")
    assert contents(server) == [sent]


def test_a_long_paste_with_quotes_inside_is_one_message(chat: Callable[..., Chat], server: FakeServer) -> None:
    """F09"""
    terminal = chat()
    lines = "\n".join(f'line {i} with """ inside' for i in range(5000))
    writer = threading.Thread(target=terminal.type, args=(f"\x1b[200~{lines}\x1b[201~\r",))
    writer.start()
    terminal.wait_for("world.")
    writer.join()
    assert contents(server) == [lines]


def test_a_system_message_may_have_several_lines(chat: Callable[..., Chat], server: FakeServer) -> None:
    """F09"""
    terminal = chat()
    terminal.type('/set system """Be\r')
    terminal.wait_for("... ")
    terminal.type('brief."""\r')
    terminal.wait_for("Set system message.")
    terminal.type("hi\r")
    terminal.wait_for("world.")
    assert server.bodies("/api/chat")[0]["messages"][0] == {"role": "system", "content": "Be\nbrief."}


def test_history_can_be_turned_off_in_the_middle(
    chat: Callable[..., Chat], environ: dict[str, str], server: FakeServer
) -> None:
    terminal = chat()
    for text, answer in (("open", "world."), ("/set nohistory", "Set 'nohistory' mode."), ("secret", "world.")):
        terminal.forget()
        terminal.type(f"{text}\r")
        terminal.wait_for(answer)
    assert (Path(environ["ARRIERO_HOME"]) / "history.jsonl").read_text() == '"open"\n"/set nohistory"\n'


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
