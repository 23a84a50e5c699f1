"""What one template does with what clients send, found by rendering short conversations once.

A template that refuses something says so, and other readings of the conversation are tried. These probes are about what
a template leaves out without a word.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from arriero.chat.messages import Message, ToolCall
from arriero.chat.renderers.control import ControlText
from arriero.chat.renderers.objects import CallStyle, call_style, message_objects, takes_parts
from arriero.chat.template import ChatTemplate
from arriero.errors import TemplateError

log = logging.getLogger(__name__)

_SHOWN = "probe_text"
_EFFORTS: Mapping[str, tuple[str, ...]] = {
    "low": ("low", "minimal", "medium"),
    "medium": ("medium", "high", "low"),
    "high": ("high", "xhigh", "max", "medium"),
    "max": ("high", "xhigh", "max", "medium"),
}
"""The levels of thinking that clients name, and what to try in their place, best first."""


class Probes:
    """One template's habits; each is looked for when it first matters."""

    def __init__(self, template: ChatTemplate, arguments: Mapping[str, Any], image_token: str | None = None) -> None:
        """`arguments` are those of a conversation without tools."""
        self._template = template
        self._arguments = dict(arguments)
        self._image_token = image_token
        self._efforts: dict[str, str] = {}

    @cached_property
    def calls(self) -> CallStyle:
        """How it wants turns with calls."""
        return call_style(self._template, self._arguments)

    @cached_property
    def takes_parts(self) -> bool:
        """Whether it writes the image's token for an image among the parts of a message."""
        return takes_parts(self._template, self._arguments, self._image_token or "")

    @cached_property
    def drops_developer(self) -> bool:
        """Whether a developer message vanishes."""
        return self._drops([Message(role="developer", content=_SHOWN), Message(role="user", content="Salve")])

    @cached_property
    def drops_late_system(self) -> bool:
        """Whether a system message behind the first turns vanishes."""
        turns = [("user", "Salve"), ("assistant", "Salve"), ("system", _SHOWN), ("user", "Vale")]
        return self._drops([Message(role=role, content=text) for role, text in turns])

    @cached_property
    def drops_parallel_calls(self) -> bool:
        """Whether of several calls in one turn only the first is shown."""
        calls = [ToolCall(name=name, id=f"{name}12"[-9:]) for name in ("probe_one", _SHOWN)]
        results = [Message(role="tool", content="x", tool_call_id=call.id, tool_name=call.name) for call in calls]
        asked = [Message(role="user", content="Salve"), Message(role="assistant", tool_calls=calls), *results]
        first = [*asked[:1], Message(role="assistant", tool_calls=calls[1:]), results[1]]
        # One that shows no calls at all is another matter.
        return self._drops(asked) and not self._drops(first)

    def turns(self, control: ControlText) -> set[str]:
        """Those of some control tokens that stand around and between turns of plain text."""
        found: set[str] = set()
        for first in ([Message(role="system", content="Salve")], []):
            turns = [*first, *(Message(role=role, content="Salve") for role in ("user", "assistant", "user"))]
            try:
                text = self._render(turns)
            except TemplateError as error:
                log.debug("a probe was refused: %s", error)
                continue
            found |= {text[start:end] for start, end in control.spans(text)}
        return found

    def effort(self, think: str) -> str:
        """The level nearest to `think` that the template accepts."""
        if think not in self._efforts:
            found = (level for level in _EFFORTS.get(think, (think,)) if self._accepts(level))
            self._efforts[think] = next(found, _EFFORTS.get(think, (think,))[0])
        return self._efforts[think]

    def _accepts(self, level: str) -> bool:
        try:
            self._render([Message(role="user", content="Salve")], reasoning_effort=level, enable_thinking=True)
        except TemplateError as error:
            log.debug("reasoning effort %s: %s", level, error)
            return False
        return True

    def _drops(self, messages: list[Message]) -> bool:
        try:
            return _SHOWN not in self._render(messages)
        except TemplateError as error:
            log.debug("a probe was refused: %s", error)
            return False

    def _render(self, messages: list[Message], **more: Any) -> str:
        style = self.calls if any(message.tool_calls for message in messages) else CallStyle()
        return self._template.render({**self._arguments, **more, "messages": message_objects(messages, style)})
