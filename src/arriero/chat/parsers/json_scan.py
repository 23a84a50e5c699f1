"""Finds the end of a JSON value in a text that grows, without looking at any character twice."""

from __future__ import annotations

import re
from typing import Literal

_SPACE = re.compile(r"[ \t\n\r]*")
_IN_STRING = re.compile(r'[^"\\]*')
_BARE = re.compile(r"[-+.\w]*")
_WORD = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|true|false|null")

_State = Literal["value", "first", "string", "bare", "colon", "after"]


class JsonScan:
    """Follows the grammar of one object or array. Line breaks inside strings, which JSON forbids, are let through."""

    def __init__(self, start: int) -> None:
        """`start` is where the value begins."""
        self.at = start
        """How far was looked; the end of the value once `read` says True, where it broke once `read` says False."""
        self._state: _State = "value"
        self._closers: list[str] = []
        self._key = False
        self._from = start

    @property
    def missing(self) -> str:
        """The brackets that would complete the value, if it is broken off just after a value; else nothing."""
        return "".join(reversed(self._closers)) if self._state == "after" else ""

    def read(self, text: str) -> bool | None:
        """True when the value is complete, False when it is broken, None when more text is needed."""
        while self._state != "after" or self._closers:
            if self._state not in ("string", "bare"):
                space = _SPACE.match(text, self.at)
                assert space is not None
                self.at = space.end()
            if self.at >= len(text):
                return None
            moved = self._step(text)
            if moved is not True:
                return moved
        return True

    def _step(self, text: str) -> bool | None:
        """One move; None when more text is needed, False when the value is broken."""
        if self._state == "string":
            return self._string(text)
        if self._state == "bare":
            return self._bare(text)
        char = text[self.at]
        if self._state in ("value", "first"):
            return self._value(char)
        if self._state == "colon":
            if char != ":":
                return False
            self._state, self._key = "value", False
        elif char == ",":
            self._key = self._closers[-1] == "}"
            self._state = "value"
        elif char == self._closers[-1]:
            self._closers.pop()
        else:
            return False
        self.at += 1
        return True

    def _value(self, char: str) -> bool:
        if self._state == "first" and char == self._closers[-1]:
            self._closers.pop()
            self._state, self._key = "after", False
        elif char == '"':
            self._state = "string"
        elif self._key:
            return False
        elif char in "{[":
            self._closers.append("}" if char == "{" else "]")
            self._state, self._key = "first", char == "{"
        elif not self._closers:
            return False
        else:
            self._state, self._from = "bare", self.at
            return True
        self.at += 1
        return True

    def _string(self, text: str) -> bool | None:
        inside = _IN_STRING.match(text, self.at)
        assert inside is not None
        self.at = inside.end()
        if self.at >= len(text):
            return None
        if text[self.at] == "\\":
            if self.at + 1 >= len(text):
                return None
            self.at += 2
            return True
        self.at += 1
        self._state = "colon" if self._key else "after"
        return True

    def _bare(self, text: str) -> bool | None:
        bare = _BARE.match(text, self.at)
        assert bare is not None
        self.at = bare.end()
        if self.at >= len(text):
            return None if self.at - self._from <= 400 else False
        if self.at - self._from > 400 or not _WORD.fullmatch(text, self._from, self.at):
            return False
        self._state = "after"
        return True
