"""The parser of models that think between two tags before they answer: `<think>…</think>`."""

from __future__ import annotations

from typing import Literal

from arriero.chat.parsers.events import Content, Event, Thinking

_State = Literal["start", "thinking", "after", "content"]


class ThinkingParser:
    """One block of thinking at the beginning of the reply, then content.

    White space around the tags belongs to neither. A tag later in the content is content. A block that never ends is
    thinking to the last character.
    """

    def __init__(self, prompt: str = "", *, opening: str = "<think>", closing: str = "</think>") -> None:
        """`prompt` is what was rendered: a template may open the block itself, or open and close it."""
        self._opening = opening
        self._closing = closing
        self._held = ""
        self._started = False
        ending = prompt.rstrip()
        self._state: _State = "start"
        if ending.endswith(opening):
            self._state = "thinking"
        elif ending.endswith(closing):
            self._state = "content"

    def feed(self, text: str) -> list[Event]:
        self._held += text
        events: list[Event] = []
        while self._advance(events):
            continue
        return events

    def flush(self) -> list[Event]:
        held, self._held = self._held, ""
        if not held:
            return []
        return [Thinking(held)] if self._state == "thinking" else [Content(held)]

    def _advance(self, events: list[Event]) -> bool:
        """One move of the machine; False when more text is needed."""
        if self._state == "start":
            return self._open()
        if self._state == "thinking":
            return self._think(events)
        if self._state == "after":
            self._held = self._held.lstrip()
            if self._held:
                self._state = "content"
        if self._state == "content" and self._held:
            events.append(Content(self._held))
            self._held = ""
        return False

    def _open(self) -> bool:
        text = self._held.lstrip()
        if text.startswith(self._opening):
            self._held = text[len(self._opening) :]
            # A tag was seen, so a second one inside the block is part of the thinking.
            self._state, self._started = "thinking", False
            self._opening = ""
            return True
        if self._opening.startswith(text):
            return False
        self._state = "content"
        return True

    def _think(self, events: list[Event]) -> bool:
        if not self._started:
            text = self._held.lstrip()
            if self._opening and text.startswith(self._opening):
                # The template had opened the block and the model opened it again.
                text = text[len(self._opening) :].lstrip()
                self._opening = ""
            elif self._opening and self._opening.startswith(text):
                return False
            self._held = text
            if not text:
                return False
            self._opening = ""
            self._started = True
        before, found, after = self._held.partition(self._closing)
        if found:
            if before.rstrip():
                events.append(Thinking(before.rstrip()))
            self._state, self._held = "after", after
            return True
        keep = _waiting(before, self._closing)
        if keep < len(before):
            events.append(Thinking(before[: len(before) - keep]))
            self._held = before[len(before) - keep :]
        return False


def _waiting(text: str, tag: str) -> int:
    """Length of the end of `text` that may be white space before the tag and the tag's beginning."""
    size = next((size for size in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:size])), 0)
    body = text[: len(text) - size]
    return size + len(body) - len(body.rstrip())
