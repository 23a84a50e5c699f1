"""OpenAI's chat messages, tools and formats → the neutral conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from arriero.chat import messages as chat
from arriero.chat.messages import Think
from arriero.errors import InvalidRequest, UnsupportedFeature
from arriero.server.compat.fields import warn_once
from arriero.server.compat.parts import Part, PartKinds
from arriero.server.compat.prepare import Offer, think_of_effort
from arriero.server.models import OpenModel
from arriero.server.requests import tools_of
from arriero.server.schemas.openai import ChatMessage, ChatRequest, PastCall


def image_url(part: Part, where: str) -> str:
    """The data URL of an `image_url` part, which is a text or an object around one."""
    value = part.get("image_url")
    url = value.get("url") if isinstance(value, dict) else value
    if not isinstance(url, str):
        raise InvalidRequest(f"{where}.image_url must be a data URL or an object with one as url")
    return url


PARTS = PartKinds(
    texts={"text": "text", "refusal": "refusal", "input_text": "text", "output_text": "text"},
    images={"image_url": image_url, "input_image": image_url},
    ignored={"thinking": "thoughts are taken from reasoning", "reasoning": "thoughts are taken from reasoning"},
    refused={"input_audio": "models here don't hear", "file": "send the file's text, or its pages as images"},
)


def messages_of(model: OpenModel, messages: Sequence[ChatMessage]) -> list[chat.Message]:
    """The conversation; raises InvalidRequest naming the message that can't be read."""
    if not messages:
        raise InvalidRequest("messages is empty: at least one message is needed")
    names: dict[str, str] = {}
    return [_message(model, f"messages[{index}]", message, names) for index, message in enumerate(messages)]


def _message(model: OpenModel, where: str, message: ChatMessage, names: dict[str, str]) -> chat.Message:
    if not message.role:
        raise InvalidRequest(f"{where}.role is missing")
    role = message.role.lower()
    # The model's own text must stay what it was; others' parts get a line each.
    content = PARTS.read(message.content, f"{where}.content", "" if role == "assistant" else "\n")
    found = content.message(model, f"{where}.content", "tool" if role == "function" else role)
    if found.role == "tool":
        found.tool_call_id = message.tool_call_id
        found.tool_name = message.name or names.get(message.tool_call_id, "")
    if role == "assistant":
        found.content = found.content or message.refusal
        reasoning = message.reasoning if isinstance(message.reasoning, str) else ""
        found.thinking = message.reasoning_content or reasoning or message.thinking
        calls = list(message.tool_calls)
        if message.function_call is not None:
            calls.append(PastCall(function=message.function_call))
        found.tool_calls = [_call(f"{where}.tool_calls[{index}]", call) for index, call in enumerate(calls)]
        names |= {call.id: call.name for call in found.tool_calls if call.id}
    return found


def _call(where: str, call: PastCall) -> chat.ToolCall:
    if call.function is not None:
        return chat.ToolCall(name=call.function.name, arguments=call.function.arguments, id=call.id)
    if call.custom is not None:
        return chat.ToolCall(name=call.custom.name, arguments={"input": call.custom.input}, id=call.id)
    raise InvalidRequest(f"{where}.function is missing")


def think_of_request(asked: ChatRequest) -> Think:
    """The effort of reasoning, by whichever field says it: `reasoning`, then `reasoning_effort`, then `think`."""
    reasoning = asked.reasoning
    if isinstance(reasoning, dict):
        if reasoning.get("effort") is not None:
            return think_of_effort(reasoning["effort"], "reasoning.effort")
        if isinstance(reasoning.get("enabled"), bool):
            return bool(reasoning["enabled"])
    elif reasoning is not None:
        return think_of_effort(reasoning, "reasoning")
    if asked.reasoning_effort is not None:
        return think_of_effort(asked.reasoning_effort, "reasoning_effort")
    return think_of_effort(asked.think, "think")


def functions(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The functions of a list of tools; other kinds have no one here to run them, and are left out with a warning."""
    kept = []
    for tool in tools:
        kind = tool.get("type") or "function"
        if kind == "function":
            kept.append(tool)
        else:
            warn_once(
                "tools", f"tools of type '{str(kind)[:80]}' are left out: only functions are offered to the model"
            )
    return kept


def offer_of(model: OpenModel, tools: Sequence[dict[str, Any]], choice: Any) -> Offer:
    """The tools that the model is shown, after `tool_choice`.

    Raises UnsupportedFeature for a model that can't call tools, InvalidRequest for a choice that means nothing.
    """
    if choice == "none":
        return Offer([])
    offer = Offer(tools_of(model, functions(tools)))
    if choice in (None, "auto"):
        return offer
    if choice == "required":
        return offer.force(None, "tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "allowed_tools":
        return _allowed(offer, choice.get("allowed_tools", choice))
    if kind == "function":
        function = choice.get("function", choice)
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str):
            return offer.force(name, "tool_choice")
        raise InvalidRequest("tool_choice.function.name is missing")
    if isinstance(kind, str) and kind:
        raise UnsupportedFeature(f"tool_choice of type '{kind[:80]}' is not supported: only functions can be chosen")
    raise InvalidRequest('tool_choice must be "none", "auto", "required", or an object that names tools')


def _allowed(offer: Offer, allowed: Any) -> Offer:
    entries = allowed.get("tools") if isinstance(allowed, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise InvalidRequest("tool_choice.allowed_tools.tools must be a list of tools")
    functions = [entry.get("function", entry) for entry in entries]
    names = [function.get("name") for function in functions if isinstance(function, dict)]
    narrowed = Offer([tool for tool in offer.tools if tool.name in names])
    mode = allowed.get("mode", "auto")
    if mode == "required":
        return narrowed.force(None, "tool_choice.allowed_tools")
    if mode != "auto":
        raise InvalidRequest('tool_choice.allowed_tools.mode must be "auto" or "required"')
    return narrowed


def format_of(value: Any, where: str) -> Any:
    """A `response_format` as the native `format`: None, "json" or a schema; InvalidRequest for other kinds."""
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else value
    if kind == "text":
        return None
    if kind == "json_object":
        return "json"
    if kind == "json_schema" and isinstance(value, dict):
        holder = value.get("json_schema", value)
        schema = holder.get("schema") if isinstance(holder, dict) else None
        if not isinstance(schema, dict):
            raise InvalidRequest(f"{where} of type json_schema needs a schema that is an object")
        return schema
    raise InvalidRequest(f'{where}.type must be "text", "json_object" or "json_schema"; it is {kind!r:.60}')
