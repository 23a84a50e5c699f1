"""Calls as Gemma writes them: `call:name{key:value,…}`, strings between a marker of their own instead of quotes."""

from __future__ import annotations

import json
import re
from typing import Any

from arriero.chat.messages import ToolCall
from arriero.chat.parsers.offered import OfferedTools
from arriero.chat.parsers.syntax import Done, Failed, Outcome

_DEPTH = 64
"""Objects inside objects that are followed."""
_HEADER = re.compile(r"\s*call:\s{0,8}(?P<name>[^{}\s<>]{1,128})\s{0,8}(?=\{)")
_HEADER_PART = re.compile(r"\s*(?:c(?:a(?:l(?:l(?::\s{0,8}[^{}\s<>]{0,128}\s{0,8})?)?)?)?)?")
_KEY = re.compile(r"\s*(?P<key>[^{}\[\],:<>\"']{1,256}?)\s*:\s*")
_BARE = re.compile(r"\s*(?P<word>-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|true|false|null)\s*(?=[,}\]])")
_SPACE = re.compile(r"\s*")


class GemmaReader:
    """One call up to its closing tag.

    A closing tag inside a string is part of the string. A call with misplaced string markers is repaired once no more
    text comes.
    """

    def __init__(self, start: int, closing: str, quote: str, tools: OfferedTools) -> None:
        self._start = self._at = start
        self._closing = closing
        self._quote = quote
        self._tools = tools
        self._name = ""
        self._body = start
        self._quotes = 0
        self._counted = start

    def read(self, text: str) -> Outcome:
        if not self._name:
            found = _HEADER.match(text, self._start)
            if found is None:
                return None if _HEADER_PART.fullmatch(text, self._start) else Failed()
            self._name = found["name"]
            self._body = self._at = self._counted = found.end()
        while True:
            closing = text.find(self._closing, self._at)
            if closing < 0:
                self._at = max(self._at, len(text) - len(self._closing) + 1)
                return None
            self._quotes += text.count(self._quote, self._counted, closing)
            self._counted = closing
            self._at = closing + len(self._closing)
            # An odd number of markers: the tag stands in a string.
            if self._quotes % 2 == 0:
                arguments = _arguments(text[self._body : closing], self._quote)
                if arguments is not None:
                    return Done(self._at, (ToolCall(name=self._name, arguments=arguments),))
                if not self._quotes:
                    return self._repaired(text, closing)

    def finish(self, text: str) -> Outcome:
        if not self._name:
            return Failed()
        closing = text.find(self._closing, self._body)
        if closing >= 0:
            return self._repaired(text, closing)
        # The end of the turn may take the place of the tag.
        end = len(text.rstrip())
        arguments = _arguments(text[self._body : end], self._quote)
        return Failed() if arguments is None else Done(end, (ToolCall(name=self._name, arguments=arguments),))

    def _repaired(self, text: str, closing: int) -> Outcome:
        body = text[self._body : closing].strip()
        body = body[1:-1] if body.endswith("}") else body[1:]
        arguments = self._split(body)
        if arguments is None:
            return Failed()
        return Done(closing + len(self._closing), (ToolCall(name=self._name, arguments=arguments),))

    def _split(self, body: str) -> dict[str, Any] | None:
        """Arguments cut at the names of the tool's parameters, or at anything like a name when those aren't known."""
        if not body.strip():
            return {}
        declared = "|".join(re.escape(name) for name in self._tools.parameters(self._name))
        for names in filter(None, (declared, r"[A-Za-z_]\w{0,63}")):
            cuts = list(re.finditer(rf"(?:^|,)\s*({names})\s*:", body))
            if cuts and not body[: cuts[0].start()].strip():
                break
        else:
            return None
        found: dict[str, Any] = {}
        for index, cut in enumerate(cuts):
            stop = cuts[index + 1].start() if index + 1 < len(cuts) else len(body)
            found[cut[1]] = self._value(cut[1], body[cut.end() : stop])
        return found

    def _value(self, parameter: str, text: str) -> Any:
        whole = _arguments("{x:" + text + "}", self._quote)
        if whole is not None and list(whole) == ["x"]:
            return whole["x"]
        bare = text.replace(self._quote, "").strip()
        if len(bare) > 1 and bare[0] == bare[-1] and bare[0] in "'\"":
            return bare[1:-1]
        return self._tools.value(self._name, parameter, bare)


def _arguments(text: str, quote: str) -> dict[str, Any] | None:
    """The object that a text holds from its first to its last character, in this notation; None for anything else."""
    values = _Values(text, quote)
    try:
        value = values.value(0)
    except _BrokenError:
        return None
    return value if isinstance(value, dict) and values.at_end() else None


class _BrokenError(Exception):
    pass


class _Values:
    """Reads values one after another, in one pass."""

    def __init__(self, text: str, quote: str) -> None:
        self._text = text
        self._quote = quote
        self._at = 0

    def at_end(self) -> bool:
        self._skip()
        return self._at == len(self._text)

    def value(self, depth: int) -> Any:
        self._skip()
        if depth > _DEPTH:
            raise _BrokenError
        if self._text.startswith(self._quote, self._at):
            return self._string()
        if self._take("{"):
            return self._object(depth)
        if self._take("["):
            return self._list(depth)
        found = _BARE.match(self._text, self._at)
        if found is None:
            raise _BrokenError
        self._at = found.end()
        try:
            return json.loads(found["word"])
        except ValueError as error:  # digits beyond Python's limit
            raise _BrokenError from error

    def _object(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self._take("}"):
            return found
        while True:
            key = self._key()
            found[key] = self.value(depth + 1)
            if self._take("}"):
                return found
            self._need(",")

    def _list(self, depth: int) -> list[Any]:
        found: list[Any] = []
        if self._take("]"):
            return found
        while True:
            found.append(self.value(depth + 1))
            if self._take("]"):
                return found
            self._need(",")

    def _key(self) -> str:
        self._skip()
        if self._text.startswith(self._quote, self._at):
            key = self._string()
            self._need(":")
            return key
        found = _KEY.match(self._text, self._at)
        if found is None:
            raise _BrokenError
        self._at = found.end()
        return found["key"]

    def _string(self) -> str:
        start = self._at + len(self._quote)
        end = self._text.find(self._quote, start)
        if end < 0:
            raise _BrokenError
        self._at = end + len(self._quote)
        return self._text[start:end]

    def _take(self, char: str) -> bool:
        self._skip()
        found = self._text.startswith(char, self._at)
        self._at += found
        return found

    def _need(self, char: str) -> None:
        if not self._take(char):
            raise _BrokenError

    def _skip(self) -> None:
        space = _SPACE.match(self._text, self._at)
        assert space is not None
        self._at = space.end()
