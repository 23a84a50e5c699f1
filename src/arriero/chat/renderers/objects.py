"""Messages as the dictionaries that templates read, calls in the form that a template shows."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from arriero.chat.messages import Message, ToolCall
from arriero.chat.template import ChatTemplate
from arriero.errors import TemplateError

log = logging.getLogger(__name__)

Form = Literal["mapping", "text", "wrapped"]
"""How arguments are given: as an object; as JSON text; as an object even when the client's text is none."""

_PROBE = {"probe_key": "probe_value"}


@dataclass(frozen=True, slots=True)
class CallStyle:
    """How a template wants turns with calls."""

    form: Form = "mapping"
    null_content: bool = False
    """It shows calls only in turns whose content is none; text beside calls needs a turn of its own."""


def call_style(template: ChatTemplate, arguments: Mapping[str, Any]) -> CallStyle:
    """The first style in which a call, rendered once, shows up in the prompt.

    A template that never shows calls is a warning: the model won't see the calls of a conversation's history.
    """
    messages = [
        Message(role="user", content="probe"),
        Message(role="assistant", tool_calls=[ToolCall(name="probe", arguments=_PROBE, id="probe1234")]),
        Message(role="tool", content="probe", tool_name="probe", tool_call_id="probe1234"),
    ]
    for null_content in (False, True):
        for form in ("mapping", "text"):
            style = CallStyle(form, null_content)
            try:
                text = template.render({**arguments, "messages": message_objects(messages, style)})
            except TemplateError as error:
                log.debug("calls as %s: %s", style, error)
                continue
            # A template that puts an object into text as it is shows Python's spelling of it.
            if "probe_value" in text and str(_PROBE) not in text:
                return style
    log.warning("the chat template doesn't show the calls of earlier turns: the model won't see them")
    return CallStyle()


def takes_parts(template: ChatTemplate, arguments: Mapping[str, Any], written: str) -> bool:
    """Whether a template writes `written` for an image among the parts of a message, beside the text."""
    parts = [{"type": "image"}, {"type": "text", "text": "probe_text"}]
    try:
        text = template.render({**arguments, "messages": [{"role": "user", "content": parts}]})
    except TemplateError as error:
        log.debug("contents of parts: %s", error)
        return False
    # A template that takes contents for text shows Python's spelling of the list.
    return text.count(written) == 1 and "probe_text" in text and str(parts[1]) not in text


def message_objects(messages: list[Message], style: CallStyle, image_mark: str | None = None) -> list[dict[str, Any]]:
    """The conversation as a template's `messages`; keys that don't apply are absent.

    Contents that hold `image_mark` become lists of parts, an image in each mark's place.
    """
    names = {call.id: call.name for message in messages for call in message.tool_calls if call.id}
    found: list[dict[str, Any]] = []
    for message in messages:
        item = _object(message, names, image_mark)
        if message.tool_calls:
            calls = [_call(call, style.form) for call in message.tool_calls]
            if style.null_content:
                if message.content:
                    found.append(dict(item))
                item["content"] = None
            item["tool_calls"] = calls
        found.append(item)
    return found


def _object(message: Message, names: Mapping[str, str], image_mark: str | None) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if image_mark is not None and image_mark in message.content:
        parts: list[dict[str, str]] = []
        for index, text in enumerate(message.content.split(image_mark)):
            parts += [{"type": "image"}] * bool(index)
            parts += [{"type": "text", "text": text}] * bool(text)
        found["content"] = parts
    if message.thinking:
        for key in ("reasoning_content", "thinking", "reasoning"):
            found[key] = message.thinking
    name = message.tool_name or names.get(message.tool_call_id, "")
    if message.role == "tool" and name:
        found["name"] = name
    if message.tool_call_id:
        found["tool_call_id"] = message.tool_call_id
    return found


def _call(call: ToolCall, form: Form) -> dict[str, Any]:
    mapping = call.mapping()
    arguments: Any = call.text()
    if form != "text" and mapping is not None:
        arguments = mapping
    elif form == "wrapped":
        arguments = {"arguments": arguments}
    function = {"name": call.name, "arguments": arguments}
    return {"type": "function", "function": function} | ({"id": call.id} if call.id else {})
