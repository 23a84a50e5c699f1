"""What parsers make of a streamed reply."""

from __future__ import annotations

from typing import Protocol

import msgspec

from arriero.chat.messages import ToolCall


class Thinking(msgspec.Struct, frozen=True):
    """A piece of the model's reasoning."""

    text: str


class Content(msgspec.Struct, frozen=True):
    """A piece of the answer."""

    text: str


class ToolCallEvent(msgspec.Struct, frozen=True):
    """A complete call."""

    call: ToolCall
    source: str = ""
    """What the model wrote for it; of several calls written in one block, the first has it all."""


Event = Thinking | Content | ToolCallEvent


class Parser(Protocol):
    """A state machine over pieces of text, whatever the split. Never raises: in the worst case text is content."""

    def feed(self, text: str) -> list[Event]:
        """What is certain now; text that may be part of a marker waits."""
        ...

    def flush(self) -> list[Event]:
        """What was waiting at the end of the reply; nothing is lost."""
        ...
