"""Calls written as JSON: `{"name": …, "arguments": {…}}`, alone, in a row or in a list, or arguments behind a name."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

from arriero.chat.messages import ToolCall
from arriero.chat.parsers.json_scan import JsonScan
from arriero.chat.parsers.marks import past_space, reach
from arriero.chat.parsers.offered import OfferedTools
from arriero.chat.parsers.syntax import Done, Failed, Outcome

_NAMES = ("name", "tool_name", "function")
_ARGUMENTS = ("arguments", "parameters", "args")
_IDS = ("id", "tool_call_id")
_SEPARATORS = re.compile(r"[\s;,]*")
_CALL = re.compile(r'[\[\s]{0,64}\{\s*"(?:name|type|function|id|tool_name|tool_call_id|arguments|parameters)"')
_CALL_PART = re.compile(r'[\[\s]{0,64}(?:\{\s*(?:"\w{0,12})?)?')
_HEADER_ROOM = 400
"""Characters that may stand between an opening and the arguments."""


def calls_of(text: str) -> tuple[ToolCall, ...] | None:
    """The calls that a JSON text holds; None when it holds anything else."""
    value = _loads(text)
    items = value if isinstance(value, list) else [value]
    calls = [_call(item) for item in items]
    found = tuple(call for call in calls if call is not None)
    return found if found and len(found) == len(calls) else None


def arguments_of(text: str) -> dict[str, Any] | None:
    """The object of arguments that a JSON text holds, or the text of one inside a JSON string; else None."""
    value = _loads(text)
    if isinstance(value, str):
        value = _loads(value) if value.strip() else {}
    return value if isinstance(value, dict) else None


class JsonReader:
    """Objects or lists of calls, and the closing tag behind them if there is one.

    A row of them counts as one block. A missing bracket before the closing tag is added.
    """

    def __init__(self, start: int, closing: str = "", only: OfferedTools | None = None) -> None:
        """`only`: calls to other tools are none; that is for JSON without a tag, which may be an answer."""
        self._at = start
        self._closing = closing
        self._only = only
        self._scan: JsonScan | None = None
        self._calls: list[ToolCall] = []
        self._end = start

    def read(self, text: str) -> Outcome:
        while True:
            if self._scan is None:
                outcome = self._between(text)
                if not isinstance(outcome, bool):
                    return outcome
                if self._only is not None and not _CALL.match(text, self._at):
                    # An answer in JSON shows by its first key that it is no call, and need not wait.
                    return None if _CALL_PART.fullmatch(text, self._at) else self._failed()
                self._scan = JsonScan(self._at)
            complete = self._scan.read(text)
            if complete is None:
                return None
            written = text[self._at : self._scan.at]
            if not complete:
                # The scan stops at the closing tag when brackets are missing.
                closed = bool(self._closing and self._scan.missing) and reach(text, self._scan.at, self._closing)
                if closed is None:
                    return None
                if not closed:
                    return self._failed()
                written += self._scan.missing
            calls = calls_of(written)
            if calls is None or (self._only is not None and any(call.name not in self._only for call in calls)):
                return self._failed()
            self._calls += calls
            self._end = self._at = self._scan.at
            self._scan = None

    def finish(self, text: str) -> Outcome:
        return self._failed()

    def _between(self, text: str) -> Outcome | Literal[True]:
        """True when a value begins; an outcome when the block is over or more text is needed."""
        separators = _SEPARATORS.match(text, self._at)
        assert separators is not None
        self._at = past_space(text, self._at) if not self._calls else separators.end()
        if self._at >= len(text):
            return None
        if text[self._at] in "{[":
            return True
        if not self._calls:
            return Failed()
        # One bracket too many is as common as one too few.
        extra = self._at + (text[self._at] in "}]")
        closed = bool(self._closing) and reach(text, past_space(text, extra), self._closing)
        if closed is None or (self._closing and past_space(text, extra) >= len(text)):
            return None
        return Done(past_space(text, extra) + len(self._closing) if closed else self._end, tuple(self._calls))

    def _failed(self) -> Outcome:
        return Done(self._end, tuple(self._calls)) if self._calls else Failed()


class NamedJsonReader:
    """A name, an object of arguments, and what may stand behind it."""

    def __init__(self, start: int, header: re.Pattern[str], closing: re.Pattern[str] | None = None) -> None:
        """`header` matches up to the object, in at most 400 characters, and names the groups `name` and maybe `id`.

        `closing` is tried behind the object once what follows is no white space; without a match it is let go.
        """
        self._start = start
        self._header = header
        self._closing = closing
        self._scan: JsonScan | None = None
        self._call: ToolCall | None = None
        self._at = start

    def read(self, text: str) -> Outcome:
        if self._scan is None:
            found = self._header.match(text, self._start)
            if found is None:
                return Failed() if len(text) - self._start > _HEADER_ROOM else None
            if found.end() - self._start > _HEADER_ROOM:
                return Failed()
            groups = found.groupdict()
            self._call = ToolCall(name=groups["name"], id=groups.get("id") or "")
            self._at = found.end()
            self._scan = JsonScan(self._at)
        assert self._call is not None
        complete = self._scan.read(text)
        if complete is None:
            return None
        arguments = arguments_of(text[self._at : self._scan.at]) if complete else None
        if arguments is None:
            return Failed()
        self._call.arguments = arguments
        end = self._scan.at
        if self._closing is not None:
            found = self._closing.match(text, end)
            if found is None and len(text) - end < _HEADER_ROOM:
                return None
            end = found.end() if found is not None else end
        return Done(end, (self._call,))

    def finish(self, text: str) -> Outcome:
        if self._scan is not None and self._call is not None and self._scan.read(text):
            arguments = arguments_of(text[self._at : self._scan.at])
            if arguments is not None:
                self._call.arguments = arguments
                return Done(self._scan.at, (self._call,))
        return Failed()


def _call(item: Any) -> ToolCall | None:
    if not isinstance(item, dict):
        return None
    if isinstance(item.get("function"), dict):
        item = {**item, **item["function"]}
    name = next((item[key] for key in _NAMES if isinstance(item.get(key), str)), "")
    arguments: Any = next((item[key] for key in _ARGUMENTS if item.get(key) is not None), {})
    if isinstance(arguments, str):
        arguments = _loads(arguments) if arguments.strip() else {}
    if not name.strip() or not isinstance(arguments, dict):
        return None
    call_id = next((item[key] for key in _IDS if isinstance(item.get(key), str)), "")
    return ToolCall(name=name.strip(), arguments=arguments, id=call_id)


def _loads(text: str) -> Any:
    """The value; line breaks inside strings are let through. None for what is no JSON, NaN and infinity included."""
    try:
        return json.loads(text, strict=False, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(name: str) -> float:
    raise ValueError(name)
