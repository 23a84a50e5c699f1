from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arriero.cli.chat.output import Printer, Wrapper
from arriero.cli.human import width


def screen(text: str) -> list[str]:
    """What a terminal shows after the codes that the wrapper uses."""
    lines, cells = [""], []
    for part in re.findall(r"\x1b\[\d+D\x1b\[K|[\s\S]", text):
        if part.startswith("\x1b"):
            erase = int(re.findall(r"\d+", part)[0])
            while erase > 0:
                erase -= width(lines[-1][-1])
                lines[-1] = lines[-1][:-1]
        elif part == "\n":
            lines.append("")
        else:
            lines[-1] += part
    assert not cells
    return lines


def wrap(pieces: list[str], columns: int) -> list[str]:
    out = io.StringIO()
    wrapper = Wrapper(out, columns)
    for piece in pieces:
        wrapper.write(piece)
    return screen(out.getvalue())


def test_a_word_that_does_not_fit_moves_to_the_next_line() -> None:
    assert wrap(["one two thr", "ee four"], 15) == ["one two ", "three four"]


def test_wide_characters_are_counted_in_cells() -> None:
    assert all(width(line) <= 10 for line in wrap(["漢字" * 20], 15))


def test_a_wide_character_after_a_long_word_does_not_take_the_word_along() -> None:
    assert wrap(["aaaaaaa漢"], 13) == ["aaaaaaa", "漢"]


@given(st.lists(st.text(alphabet="ab é漢\n", max_size=8)), st.integers(11, 40))
def test_wrapping_never_overflows_and_never_loses_a_letter(pieces: list[str], columns: int) -> None:
    lines = wrap(pieces, columns)
    assert all(width(line.rstrip()) <= columns - 5 for line in lines)
    assert "".join("".join(lines).split()) == "".join("".join(pieces).split())


@pytest.mark.parametrize("columns", [0, 5])
def test_a_terminal_without_width_is_not_wrapped(columns: int) -> None:
    assert wrap(["word " * 50], columns) == ["word " * 50]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_thoughts_are_set_apart_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    out = Terminal()
    printer = Printer(wrap=False, hide_thinking=False, out=out)
    printer.thinking("hm")
    printer.content("Yes.")
    printer.end()
    assert out.getvalue() == "Thinking...\nhm\n...done thinking.\n\nYes.\n\n"


def test_hidden_thoughts_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Terminal()
    printer = Printer(wrap=False, hide_thinking=True, out=out)
    printer.thinking("hm")
    printer.content("Yes.")
    printer.end()
    assert out.getvalue() == "Yes.\n\n"


def test_no_colour_codes_when_they_are_unwanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Terminal()
    printer = Printer(wrap=True, hide_thinking=False, out=out)
    printer.thinking("hm " * 100)
    printer.content("Yes.")
    printer.end()
    assert "\x1b" not in out.getvalue()
