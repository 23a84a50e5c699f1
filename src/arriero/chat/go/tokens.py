"""The text of a Go template → literal text and the words of its actions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from arriero.errors import TemplateError

_ACTION = re.compile(r"\{\{(?P<left>-(?=\s))?")
_COMMENT = re.compile(r"\s*/\*.*?\*/\s*?(?P<right>\s-)?\}\}", re.DOTALL)
_END = re.compile(r"(?P<right>\s-)?\}\}")
_WORD = re.compile(
    r"""
    (?P<string>"(?:[^"\\\n]|\\.)*" | `[^`]*`)
  | (?P<number>[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)
  | (?P<variable>\$\w*)
  | (?P<field>\.[A-Za-z_]\w*)
  | (?P<name>[A-Za-z_]\w*)
  | (?P<sign>:=|=|\||\(|\)|,|\.)
    """,
    re.VERBOSE,
)

_SPACE = " \t\r\n"

Kind = Literal["string", "number", "variable", "field", "name", "sign"]


@dataclass(frozen=True, slots=True)
class Word:
    """A word of an action."""

    kind: Kind
    text: str
    spaced: bool
    """Whether white space stands before it: `.A.B` is one operand, `.A .B` are two."""


@dataclass(frozen=True, slots=True)
class Action:
    """What stands in one pair of double braces."""

    words: tuple[Word, ...]
    line: int


def tokens(source: str) -> Iterator[str | Action]:
    """Literal texts and actions in order, white space trimmed where the braces say so; comments are left out.

    Raises TemplateError with the line for what is none of the language.
    """
    at, trim = 0, False
    while True:
        found = _ACTION.search(source, at)
        text = source[at : found.start() if found else len(source)]
        text = text.lstrip(_SPACE) if trim else text
        text = text.rstrip(_SPACE) if found and found["left"] else text
        if text:
            yield text
        if found is None:
            return
        line = source.count("\n", 0, found.start()) + 1
        comment = _COMMENT.match(source, found.end())
        if comment is not None:
            at, trim = comment.end(), comment["right"] is not None
            continue
        words, at, trim = _words(source, found.end(), line)
        yield Action(words, line)


def string_of(word: Word, line: int) -> str:
    """The value of a string in quotes."""
    if word.text.startswith("`"):
        return word.text[1:-1]
    try:
        return str(ast.literal_eval(word.text))
    except (ValueError, SyntaxError) as error:
        raise TemplateError(f"the Go template, line {line}: {word.text} is no string") from error


def _words(source: str, at: int, line: int) -> tuple[tuple[Word, ...], int, bool]:
    words: list[Word] = []
    while True:
        end = _END.match(source, at) or _END.match(source, _past_space(source, at))
        if end is not None:
            return tuple(words), end.end(), end["right"] is not None
        start = _past_space(source, at)
        if start > at and source.startswith("-}}", start):
            return tuple(words), start + 3, True
        found = _WORD.match(source, start)
        if found is None:
            shown = source[start : start + 20] or "the end"
            raise TemplateError(f"the Go template cannot be parsed, line {line}: {shown!r} is unknown in an action")
        kind = found.lastgroup
        assert kind is not None
        words.append(Word(kind, found[0], start > at))  # type: ignore[arg-type]
        at = found.end()


def _past_space(source: str, at: int) -> int:
    while at < len(source) and source[at].isspace():
        at += 1
    return at
