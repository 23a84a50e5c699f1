"""The marks that structure a reply, and where they stand in a text that may go on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

BREAK = "\udcff"
"""Stands within what spells a tag and is none, until the text comes out: no decoded text holds such half of a pair."""
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class ThinkingTags:
    """What stands around thinking."""

    opening: str = "<think>"
    closing: str = "</think>"
    label: str = ""
    """What follows the opening tag and is left out (a channel's name)."""
    anywhere: bool = False
    """Whether thinking may begin behind content; else the tag counts at the beginning of the reply only."""

    @property
    def whole(self) -> str:
        """Opening tag and label."""
        return self.opening + self.label


@dataclass(frozen=True, slots=True)
class Thoughts:
    """Where a reply may think before it answers."""

    opening: str
    closing: str
    opened: bool
    """The prompt has begun the thinking."""


def reach(text: str, at: int, word: str) -> bool | None:
    """Whether `word` stands at a place; None when the text ends before that is known."""
    piece = text[at : at + len(word)]
    if piece == word:
        return True
    return None if len(piece) < len(word) and word.startswith(piece) else False


def reach_any(text: str, at: int, words: tuple[str, ...]) -> str | bool | None:
    """Which of `words` stands at a place; False for none; None when the text ends before that is known."""
    waiting = False
    for word in words:
        found = reach(text, at, word)
        if found:
            return word
        waiting = waiting or found is None
    return None if waiting else False


def past_space(text: str, at: int) -> int:
    """The first place from `at` on that is no white space."""
    space = _SPACE.match(text, at)
    assert space is not None
    return space.end()


def search(marks: Sequence[str]) -> re.Pattern[str] | None:
    """What finds the first of some marks, the longest at each place; None without marks."""
    if not marks:
        return None
    return re.compile("|".join(re.escape(mark) for mark in sorted(marks, key=len, reverse=True)))


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `mark`."""
    for size in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0
