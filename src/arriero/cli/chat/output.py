"""How replies look: word wrap on a terminal, thinking apart from the answer, statistics."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any, TextIO

from arriero.cli.human import width
from arriero.durations import format_duration

_GREY, _RESET = "\x1b[90m", "\x1b[0m"
_MARGIN = 5
"""Cells left free at the right edge."""


class Wrapper:
    """Wraps streamed text at words; a word is printed as it comes and moved down when it turns out too long."""

    def __init__(self, out: TextIO, columns: int) -> None:
        self._out = out
        self._limit = columns - _MARGIN
        self._column = 0
        self._word = ""

    def write(self, text: str) -> None:
        """Print more text."""
        for char in text:
            if char == "\n":
                self._word, self._column = "", 0
                self._out.write(char)
                continue
            cells = width(char)
            if self._column + cells > self._limit > 0:
                self._break_line(char)
                if char == " ":
                    continue
            self._out.write(char)
            self._column += cells
            # Wide characters may be broken anywhere, as in the scripts that use them.
            self._word = "" if char == " " or cells == 2 else self._word + char
        self._out.flush()

    def _break_line(self, char: str) -> None:
        word = "" if char == " " or width(char) == 2 else self._word
        cells = width(word)
        if cells and cells < self._limit:
            self._out.write(f"\x1b[{cells}D\x1b[K\n{word}")
            self._column = cells
        else:
            self._out.write("\n")
            self._word, self._column = "", 0


class Printer:
    """Prints one reply. Away from a terminal only the payload reaches stdout: no wrapping, no codes, no thoughts."""

    def __init__(self, *, wrap: bool, hide_thinking: bool, out: TextIO | None = None) -> None:
        self._out = sys.stdout if out is None else out
        self._tty = self._out.isatty()
        self._thinks = self._tty and not hide_thinking
        self._colour = self._tty and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        columns = shutil.get_terminal_size((80, 24)).columns if self._tty else 0
        can_move = self._tty and os.environ.get("TERM") != "dumb"
        self._wrapper = Wrapper(self._out, columns if wrap and can_move and columns > 2 * _MARGIN else 0)
        self._thinking = False
        self._any = False
        self._ends_line = True

    def thinking(self, text: str) -> None:
        """A piece of the model's thoughts."""
        if not text or not self._thinks:
            return
        if not self._thinking:
            self._thinking = True
            self._wrapper.write("Thinking...\n")
            self._code(_GREY)
        self._write(text)

    def content(self, text: str) -> None:
        """A piece of the answer."""
        if not text:
            return
        if self._thinking:
            self._end_thinking()
        self._write(text)

    def end(self) -> None:
        """Finish the reply with a line end."""
        if self._thinking:
            self._end_thinking()
        if self._any:
            self._out.write("\n\n" if self._tty else "" if self._ends_line else "\n")
        self._out.flush()

    def _end_thinking(self) -> None:
        self._thinking = False
        self._code(_RESET)
        self._wrapper.write(("" if self._ends_line else "\n") + "...done thinking.\n\n")

    def _write(self, text: str) -> None:
        self._any = True
        self._ends_line = text.endswith("\n")
        self._wrapper.write(text)

    def _code(self, code: str) -> None:
        if self._colour:
            self._out.write(code)


def print_statistics(final: dict[str, Any], out: TextIO | None = None) -> None:
    """The timings of a reply's final object, on stderr."""
    stream = sys.stderr if out is None else out

    def line(label: str, value: str) -> None:
        stream.write(f"{label + ':':<22}{value}\n")

    line("total duration", format_duration(final.get("total_duration", 0)))
    line("load duration", format_duration(final.get("load_duration", 0)))
    for kind, label in (("prompt_eval", "prompt eval"), ("eval", "eval")):
        count, duration = final.get(f"{kind}_count", 0), final.get(f"{kind}_duration", 0)
        if count:
            line(f"{label} count", f"{count} token(s)")
        if duration:
            line(f"{label} duration", format_duration(duration))
            line(f"{label} rate", f"{count / (duration / 1e9):.2f} tokens/s")
    stream.flush()
