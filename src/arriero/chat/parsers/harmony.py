"""The parser of gpt-oss's messages with channels: analysis is thinking, final is content, recipients are tools."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import Literal

from arriero.chat.messages import Tool, ToolCall
from arriero.chat.parsers.events import Content, Event, Thinking, ToolCallEvent
from arriero.chat.parsers.json_calls import arguments_of
from arriero.chat.parsers.marks import overlap
from arriero.chat.parsers.offered import OfferedTools

log = logging.getLogger(__name__)

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_END = re.compile("|".join(re.escape(mark) for mark in _ENDS))
_IN_HEADER = ("<|start|>", "<|channel|>", "<|constrain|>", _MESSAGE)
_HEADER = re.compile(
    r"(?:<\|start\|>)?\s*(?:assistant)?\s*(?:to=[^\s<]+)?\s*"
    r"(?:<\|channel\|>\s*(?:analysis|commentary|final)(?:\s+to=[^\s<]+)?"
    r"(?:(?:\s*<\|constrain\|>\s*|\s+)(?:json|code|text))?\s*)?"
)
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_MOST = 240
"""Characters of a header."""

_Kind = Literal["thinking", "content", "call"]


class HarmonyParser:
    """Messages one after another: a header up to `<|message|>`, then the text up to one of the ending tokens.

    A message of the commentary channel without a recipient is for the user. A call whose arguments can't be read is
    content, header and all; so is text that stands where a header should.
    """

    def __init__(self, prompt: str = "", tools: Iterable[Tool] = ()) -> None:
        """`prompt` is what was rendered: it may end inside a header or inside a message."""
        self._tools = OfferedTools(tools)
        self._text = ""
        self._looked = 0
        self._given, started, open_part = "", "<|start|>" in prompt, prompt.rpartition("<|start|>")[2]
        self._kind: _Kind | None = None
        self._source = self._name = ""
        if started and not any(mark in open_part for mark in _ENDS[:3]):
            header, begun, _ = open_part.partition(_MESSAGE)
            self._given = header
            if begun:
                self._enter("", 0)
        self.answering = self._kind == "content"
        """Whether the prompt has begun the answer."""
        self.has_tools = bool(self._tools)

    def feed(self, text: str) -> list[Event]:
        held, self._text = self._text, ""
        held += text
        self._text = held
        events: list[Event] = []
        while self._advance(events):
            continue
        return events

    def flush(self) -> list[Event]:
        events: list[Event] = []
        held, self._text = self._text, ""
        if self._kind == "call":
            self._call(held, "", events)
        elif held.strip() and (self._kind is not None or held not in ("<|start|>assistant", "<|start|>")):
            events.append(Thinking(held) if self._kind == "thinking" else Content(held))
        self._kind = None
        return events

    def _advance(self, events: list[Event]) -> bool:
        if self._kind is None:
            return self._header()
        found = _END.search(self._text, self._looked)
        if found is None:
            keep = max(overlap(self._text, mark) for mark in _ENDS)
            self._looked = len(self._text) - keep
            if self._kind != "call" and self._looked:
                self._say(self._text[: self._looked], events)
                self._text, self._looked = self._text[self._looked :], 0
            return False
        body = self._text[: found.start()]
        begins_next = found[0] in ("<|start|>", "<|channel|>")
        if self._kind == "call":
            self._call(body, "" if begins_next else found[0], events)
        elif body:
            self._say(body, events)
        self._text = self._text[found.start() if begins_next else found.end() :]
        self._kind, self._looked, self._given = None, 0, ""
        return True

    def _header(self) -> bool:
        if not self._text:
            return False
        found = self._text.find(_MESSAGE, 0, _MOST)
        header = self._text if found < 0 else self._text[:found]
        if not _plausible(header, whole=found >= 0):
            # What broke the header may be a mark at its beginning, which must not begin another one.
            self._kind, self._looked = "content", int(self._text.startswith(_ENDS[3:]))
            return True
        if found < 0:
            return False
        self._enter(header, found + len(_MESSAGE))
        return True

    def _enter(self, header: str, end: int) -> None:
        """A message begins behind its header."""
        whole = self._given + header
        channel, recipient = _CHANNEL.search(whole), _RECIPIENT.search(whole)
        self._name = "" if recipient is None else recipient[1]
        if recipient is not None and self._name not in self._tools:
            self._name = self._name.removeprefix("functions.")
        self._source = self._text[:end]
        self._given = ""
        if recipient is None:
            self._kind = "thinking" if channel is not None and channel[1] == "analysis" else "content"
        elif self._name in self._tools or (self._tools and recipient[1] != self._name):
            self._kind = "call"
        else:
            # Addressed to a tool that nobody offered: the client gets to see all of it.
            self._kind, self._looked = "content", end
            return
        self._text, self._looked = self._text[end:], 0

    def _call(self, body: str, ending: str, events: list[Event]) -> None:
        arguments = arguments_of(body) if body.strip() else {}
        source = self._source + body + ending
        if arguments is None:
            log.warning("a tool call to %s holds no JSON object; it is sent as text", self._name)
            events.append(Content(source))
        else:
            events.append(ToolCallEvent(ToolCall(name=self._name, arguments=arguments), source))

    def _say(self, text: str, events: list[Event]) -> None:
        events.append(Thinking(text) if self._kind == "thinking" else Content(text))


def _plausible(header: str, *, whole: bool) -> bool:
    """Whether a text is a header, or may be the beginning of one."""
    if len(header) >= _MOST or whole:
        return len(header) < _MOST and _HEADER.fullmatch(header) is not None
    if "<|start|>".startswith(header):
        return True
    words, *others = header.removeprefix("<|start|>").split("<")
    *known, last = words.split() if words.split() and not words[-1:].isspace() else [*words.split(), ""]
    if any(word != "assistant" and not word.startswith("to=") for word in known):
        return False
    if not any(start.startswith(last) or (others and last == start) for start in ("assistant", "to=")):
        return last.startswith("to=")
    return all(
        any(f"<{part}".startswith(mark) or mark.startswith(f"<{part}") for mark in _IN_HEADER) for part in others
    )
