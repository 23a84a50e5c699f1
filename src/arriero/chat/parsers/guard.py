"""Tags that are tokens count as tags only where they came as tokens.

A model that writes *about* a tag spells it in ordinary tokens, and so does one that was talked into it: that is text.
In vocabularies where a tag is no token, text is the only way to write it, and counts.
"""

from __future__ import annotations

from typing import Any

from arriero.chat.messages import ToolCall
from arriero.chat.parsers.events import Content, Event, Parser, Thinking, ToolCallEvent
from arriero.chat.parsers.marks import BREAK
from arriero.chat.tags import Tags


class GuardedParser:
    """A parser that is told which pieces of text were tags; what spells one otherwise is broken in two for it."""

    def __init__(self, parser: Parser, tags: Tags) -> None:
        self._parser = parser
        self._tags = tags
        self._tail = ""
        """The end of the text since the last tag, which a spelled one may begin in."""
        self._broken = False

    def feed(self, text: str, tag: bool = False) -> list[Event]:
        """What is certain now; `tag`: the text is one token that is a tag, or a part of it."""
        if tag:
            self._tail = ""
            return self._whole(self._parser.feed(text))
        seen = self._tail + text
        start = len(self._tail)
        pieces, position = [], start
        for end in self._tags.ends(seen, start):
            pieces += [seen[position:end], BREAK]
            position = end
        self._broken = self._broken or bool(pieces)
        self._tail = seen[max(0, len(seen) - self._tags.longest + 1) :] if self._tags.longest else ""
        return self._whole(self._parser.feed("".join([*pieces, seen[position:]])))

    def flush(self) -> list[Event]:
        """What was waiting at the end of the reply."""
        return self._whole(self._parser.flush())

    def _whole(self, events: list[Event]) -> list[Event]:
        """Events with the text as it was."""
        return [event for event in map(_mended, events) if event is not None] if self._broken else events


def _mended(event: Event) -> Event | None:
    """An event without breaks; None where nothing is left of it."""
    if isinstance(event, ToolCallEvent):
        call = event.call
        mended = ToolCall(name=_without(call.name), arguments=_without(call.arguments), id=_without(call.id))
        return ToolCallEvent(mended, _without(event.source))
    text = event.text.replace(BREAK, "")
    if not text:
        return None
    return Thinking(text) if isinstance(event, Thinking) else Content(text)


def _without(value: Any) -> Any:
    """A JSON value without breaks."""
    if isinstance(value, str):
        return value.replace(BREAK, "")
    if isinstance(value, list):
        return [_without(item) for item in value]
    if isinstance(value, dict):
        return {_without(key): _without(item) for key, item in value.items()}
    return value
