"""The value of an instruction: unquoted, `"…"`, `"…"` tripled, or between lines of four or more quotes.

A quoted value has no escapes; it ends where a *line* ends with the closing quote, so quotes inside a line are text.
What three quotes can't hold (three quotes at the end of a line) goes between two lines of the same number of quotes,
four or more and one more than any run inside. A reader that doesn't know this form takes the closing line for an
instruction and refuses the file; it can't get the text wrong in silence.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Mapping, Sequence

SPACE = " \t\n\v\f\r\x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
SPACE += "\u2028\u2029\u202f\u205f\u3000"
"""What is trimmed around values and skipped between words: Unicode's white space."""

_FENCE = re.compile(r'"{4,}')
_TRIPLE = '"""'


class Unclosed(Exception):
    """A quote that no line closes."""


def invisible(character: str) -> bool:
    """White space, and the control and format characters that editors and web pages leave between words."""
    return character in SPACE or unicodedata.category(character) in ("Cc", "Cf")


def skip_blanks(line: str, at: int) -> int:
    """The first place from `at` on that holds something visible, or the line's length."""
    while at < len(line) and invisible(line[at]):
        at += 1
    return at


def fence_lines(lines: Sequence[str]) -> dict[str, list[int]]:
    """Where lines of nothing but four or more quotes are, by those quotes: to look up what closes a fence."""
    found: dict[str, list[int]] = {}
    for at, line in enumerate(lines):
        text = line.strip(SPACE)
        if _FENCE.fullmatch(text):
            found.setdefault(text, []).append(at)
    return found


def read_value(lines: Sequence[str], at: int, column: int, fences: Mapping[str, list[int]]) -> tuple[str, int]:
    """The value that starts in line `at` at `column` (both from 0), and the line after it; raises Unclosed.

    `fences` are the `fence_lines` of all lines.
    """
    column = skip_blanks(lines[at], column)
    first = lines[at][column:].rstrip(SPACE)
    closing = fences.get(first, [])
    place = bisect_right(closing, at)
    if place < len(closing):
        end = closing[place]
        return "\n".join(lines[at + 1 : end]), end + 1
    for quote in (_TRIPLE, '"'):
        if first.startswith(quote):
            return _read_quoted(lines, at, column, quote)
    return first, at + 1


def _read_quoted(lines: Sequence[str], at: int, column: int, quote: str) -> tuple[str, int]:
    for end in range(at, len(lines)):
        if not lines[end].rstrip(SPACE).endswith(quote):
            continue
        text = "\n".join([lines[at][column:], *lines[at + 1 : end + 1]] if end > at else [lines[at][column:]])
        text = text.strip(SPACE)
        if len(text) >= 2 * len(quote):
            return text[len(quote) : -len(quote)], end + 1
    raise Unclosed


def write_value(value: str) -> str:
    """The plainest spelling that reads back as the value."""
    longest = max((len(run) for run in re.findall(r'"+', value)), default=0)
    fence = '"' * max(4, longest + 1)
    triple = f"{_TRIPLE}{value}{_TRIPLE}"
    for text in (value, triple if '"' in value else f'"{value}"', triple):
        # A first line of quotes alone could open a fence that a later value of the file closes.
        opens = _FENCE.fullmatch(text.split("\n", 1)[0].strip(SPACE))
        if text.strip(SPACE) and not opens and _reads_as(text, value):
            return text
    return f"{fence}\n{value}\n{fence}"


def _reads_as(text: str, value: str) -> bool:
    lines = text.split("\n")
    try:
        return read_value(lines, 0, 0, fence_lines(lines)) == (value, len(lines))
    except Unclosed:
        return False
