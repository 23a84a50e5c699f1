"""Reads messages from a person: one line, or a block between triple quotes; history and keys as in Ollama's prompt."""

from __future__ import annotations

import json
import os
import sys
import termios
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.formatted_text import HTML
from prompt_toolkit.history import History
from prompt_toolkit.input import create_input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output
from wcwidth import grapheme_boundary_before

_HISTORY_LENGTH = 100
QUOTES = '"""'


class JsonHistory(History):
    """One JSON string a line, so that an entry of several lines stays one entry."""

    def __init__(self, path: Path, keeps: bool = True) -> None:
        super().__init__()
        self._path = path
        self.keeps = keeps
        """Whether new entries are added to the file."""

    def load_history_strings(self) -> Iterable[str]:
        if not self._path.exists():
            return []
        entries = []
        for line in self._path.read_text("utf-8", "replace").splitlines()[-_HISTORY_LENGTH:]:
            try:
                entry = json.loads(line)
            except ValueError:
                # A line that another program wrote: shown as it is rather than lost.
                entry = line
            if isinstance(entry, str):
                entries.append(entry)
        return reversed(entries)

    def store_string(self, string: str) -> None:
        if not self.keeps:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = self._path.read_text("utf-8", "replace").splitlines() if self._path.exists() else []
        lines = [*lines[1 - _HISTORY_LENGTH :], json.dumps(string, ensure_ascii=False)]
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text("\n".join(lines) + "\n", "utf-8")
        temporary.replace(self._path)


class Block:
    """Gathers the lines of a message, or of a `/set system`, whose text starts with triple quotes."""

    def __init__(self) -> None:
        self._lines: list[str] | None = None
        self._before = ""

    @property
    def open(self) -> bool:
        """Whether the closing quotes are still to come."""
        return self._lines is not None

    def feed(self, text: str) -> str | None:
        """The whole message once it is complete, else None."""
        if self._lines is None:
            self._before, quotes, inside = text.partition(QUOTES)
            if not quotes or self._before.split() not in ([], ["/set", "system"]):
                return text
            text = inside
            self._lines = []
        if text.rstrip().endswith(QUOTES):
            lines = [*self._lines, text.rstrip()[: -len(QUOTES)]]
            self._lines = None
            return self._before.lstrip() + "\n".join(lines).strip("\n")
        self._lines.append(text)
        return None

    def drop(self) -> None:
        """Forget what was gathered."""
        self._lines = None


class Reader:
    """The prompt. It is drawn on stderr when stdout is not a terminal, so that stdout holds replies only."""

    def __init__(self, history: Path, *, keeps: bool, placeholder: str = "Send a message (/? for help)") -> None:
        self._block = Block()
        self._history = JsonHistory(history, keeps)
        self._placeholder = placeholder
        self._session: PromptSession[str] = PromptSession(
            history=self._history,
            key_bindings=_bindings(),
            enable_open_in_editor=True,
            enable_suspend=True,
            input=create_input(sys.stdin),
            output=create_output(sys.stdout if sys.stdout.isatty() else sys.stderr),
        )
        editor = os.environ.get("ARRIERO_EDITOR") or os.environ.get("OLLAMA_EDITOR")
        if editor:
            os.environ["VISUAL"] = editor

    def keep_history(self, keeps: bool) -> None:
        """Whether messages are remembered for later sessions."""
        self._history.keeps = keeps

    def message(self) -> str:
        """The next message; raises EOFError at Ctrl-D on an empty line and KeyboardInterrupt at Ctrl-C."""
        while True:
            is_open = self._block.open
            hint = "Press Enter to send" if is_open else self._placeholder
            try:
                text = self._session.prompt(
                    "... " if is_open else ">>> ",
                    placeholder=HTML("<ansigray>{}</ansigray>").format(hint),
                    prompt_continuation=lambda *_: "... ",
                )
            except KeyboardInterrupt:
                was_open, typed = self._block.open, self._session.default_buffer.text
                self._block.drop()
                if was_open or typed:
                    continue
                raise
            if (message := self._block.feed(text)) is not None:
                return message


@contextmanager
def typed_ahead() -> Iterator[None]:
    """Keeps what is typed while a reply streams, unchanged, for the next prompt; Ctrl-C still interrupts.

    Without this the terminal would turn Enter into the key for a new line and swallow Ctrl-D.
    """
    if not sys.stdin.isatty():
        yield
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    changed = list(before)
    changed[0] &= ~termios.ICRNL
    changed[3] &= ~(termios.ICANON | termios.ECHO)
    termios.tcsetattr(descriptor, termios.TCSADRAIN, changed)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _bindings() -> KeyBindings:
    bindings = KeyBindings()

    def newline(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    add: Callable[..., Any] = bindings.add
    add("c-j")(newline)
    add("escape", "enter")(newline)

    @bindings.add("backspace")
    @bindings.add("c-h")
    def _(event: KeyPressEvent) -> None:
        # A letter with its accent, a flag or a family is one thing to the person who typed it.
        buffer = event.current_buffer
        before = buffer.document.text_before_cursor
        if not before:
            event.app.output.bell()
            return
        buffer.delete_before_cursor(len(before) - grapheme_boundary_before(before, len(before)))

    @bindings.add("c-g")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.open_in_editor()

    return bindings
