"""The parser of models whose replies have no structure."""

from __future__ import annotations

from arriero.chat.parsers.events import Content, Event


class PassthroughParser:
    """Everything is content."""

    def feed(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def flush(self) -> list[Event]:
        return []
