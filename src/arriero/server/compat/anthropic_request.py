"""Anthropic's messages, blocks and tools → the neutral conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from arriero.chat.messages import Message, Think, ToolCall
from arriero.errors import InvalidRequest, UnsupportedFeature
from arriero.server.compat.begun_prompt import BegunPrompt
from arriero.server.compat.fields import warn_once
from arriero.server.compat.parts import Content, Part, PartKinds, text_field
from arriero.server.compat.prepare import ForcedCall, Offer, offer_prompt, think_of_effort
from arriero.server.models import OpenModel
from arriero.server.prompts import ConversationPrompt
from arriero.server.requests import tools_of
from arriero.server.schemas.anthropic import CountRequest, ToolChoice, Turn

_BILLING = "x-anthropic-billing-header:"
"""A coding agent begins its system prompt with this line. It differs in every request and is not meant for a model."""


def _image(part: Part, where: str) -> str:
    source = part.get("source")
    if not isinstance(source, dict):
        raise InvalidRequest(f"{where}.source must be an object")
    if source.get("type") == "url":
        return text_field(source, "url", f"{where}.source")
    if source.get("type") != "base64":
        raise UnsupportedFeature(f"{where}.source.type is {source.get('type')!r:.40}: it must be base64 or url")
    return text_field(source, "data", f"{where}.source")


def _document(part: Part, where: str) -> str:
    source = part.get("source")
    if isinstance(source, dict) and source.get("type") == "text":
        return text_field(source, "data", f"{where}.source")
    raise UnsupportedFeature(f"{where}: only documents of plain text are supported; send the pages' text or images")


_SERVER_SIDE = "it belongs to a tool that the hosted service runs"
BLOCKS = PartKinds(
    texts={"text": "text"},
    images={"image": _image},
    ignored={
        "redacted_thinking": "only the hosted service can read it",
        "server_tool_use": _SERVER_SIDE,
        "web_search_tool_result": _SERVER_SIDE,
        "web_fetch_tool_result": _SERVER_SIDE,
        "code_execution_tool_result": _SERVER_SIDE,
        "bash_code_execution_tool_result": _SERVER_SIDE,
        "text_editor_code_execution_tool_result": _SERVER_SIDE,
        "tool_search_tool_result": _SERVER_SIDE,
        "advisor_tool_result": _SERVER_SIDE,
        "mcp_tool_use": _SERVER_SIDE,
        "mcp_tool_result": _SERVER_SIDE,
        "mcp_tool_listing": _SERVER_SIDE,
        "tool_reference": _SERVER_SIDE,
        "fallback": "the model that is asked for answers",
    },
    refused={
        "container_upload": "this server runs no code",
        "compaction": "only the hosted service can read it",
        "tool_addition": "list the tools in `tools`",
        "tool_removal": "list the tools in `tools`",
    },
)
OWN = ("thinking", "tool_use", "tool_result", "document", "search_result")
"""Blocks that are more than a piece of a text."""


def prompt_of(model: OpenModel, asked: CountRequest) -> ConversationPrompt | BegunPrompt | ForcedCall:
    """The prompt of a request; raises InvalidRequest and UnsupportedFeature, naming the place."""
    form_of(asked)
    turns = asked.messages
    begun = turns[-1] if turns and turns[-1].role == "assistant" else None
    offer = _offer(model, asked.tools, asked.tool_choice)
    made = offer_prompt(
        model,
        messages_of(model, turns if begun is None else turns[:-1]),
        offer,
        think=think_of(asked),
        system=system_of(asked.system),
        truncate=asked.truncate,
    )
    if begun is None:
        return made
    where = f"messages[{len(turns) - 1}]"
    if isinstance(made, ForcedCall):
        raise InvalidRequest(f"tool_choice: a call can't be forced when {where} begins the reply")
    last = _assistant(model, where, begun, {})
    if last.tool_calls or last.thinking or last.images:
        raise InvalidRequest(f"{where} begins the reply, so it can hold text only")
    return BegunPrompt(model, made, last.content, truncate=asked.truncate)


def form_of(asked: CountRequest) -> dict[str, Any] | None:
    """`output_config.format` as the native `format`; InvalidRequest when it holds no schema."""
    form = asked.output_config.format
    if form is None:
        return None
    schema = form.get("schema") if isinstance(form, dict) and form.get("type") == "json_schema" else None
    if not isinstance(schema, dict):
        raise InvalidRequest("output_config.format must be of type json_schema and hold a schema")
    return schema


def think_of(asked: CountRequest) -> Think:
    """Off unless asked for, as that API has it; `adaptive` thinks as hard as `output_config.effort` says."""
    kind = asked.thinking.type if asked.thinking is not None else None
    if kind == "disabled":
        return False
    effort = think_of_effort(asked.output_config.effort, "output_config.effort")
    if kind in ("enabled", "adaptive", "between_tools"):
        return True if effort is None else effort
    if kind is not None:
        raise InvalidRequest('thinking.type must be "enabled", "adaptive", "between_tools" or "disabled"')
    return False if effort is None else effort


def system_of(value: Any) -> str | None:
    """The system prompt, its blocks apart by blank lines; None for none."""
    if isinstance(value, list):
        value = [block for block in value if not _is_billing(block)]
    text = BLOCKS.read(value, "system", "\n\n").text
    return text or None


def _is_billing(block: Any) -> bool:
    text = block.get("text") if isinstance(block, dict) else None
    return isinstance(text, str) and text.startswith(_BILLING)


def messages_of(model: OpenModel, turns: Sequence[Turn]) -> list[Message]:
    """The conversation: a turn's tool results come before its text, as messages of their own."""
    if not turns:
        raise InvalidRequest("messages is required and must not be empty")
    names: dict[str, str] = {}
    found: list[Message] = []
    for index, turn in enumerate(turns):
        where = f"messages[{index}]"
        if turn.role == "assistant":
            found.append(_assistant(model, where, turn, names))
        elif turn.role in ("user", "system", "developer"):
            found += _user(model, where, turn, names)
        else:
            raise InvalidRequest(f'{where}.role must be "user", "assistant" or "system"; it is {turn.role!r:.40}')
    return found


def _assistant(model: OpenModel, where: str, turn: Turn, names: dict[str, str]) -> Message:
    thinking, calls, rest = "", [], turn.content
    if isinstance(turn.content, list):
        rest = []
        for index, block in enumerate(turn.content):
            place, kind = f"{where}.content[{index}]", _kind(block)
            if kind == "thinking":
                thinking += str(block.get("thinking") or "")
            elif kind == "tool_use":
                arguments = block.get("input")
                call = ToolCall(
                    name=text_field(block, "name", place),
                    arguments=arguments if isinstance(arguments, dict | str) else {},
                    id=text_field(block, "id", place),
                )
                names[call.id] = call.name
                calls.append(call)
            else:
                rest.append(block)
    # The model's own text must stay what it was.
    message = BLOCKS.read(rest, f"{where}.content", "").message(model, f"{where}.content", "assistant")
    message.thinking, message.tool_calls = thinking, calls
    return message


def _user(model: OpenModel, where: str, turn: Turn, names: dict[str, str]) -> list[Message]:
    if not isinstance(turn.content, list):
        return [BLOCKS.read(turn.content, f"{where}.content").message(model, where, turn.role)]
    results, rest = [], []
    for index, block in enumerate(turn.content):
        place, kind = f"{where}.content[{index}]", _kind(block)
        if kind == "tool_result":
            results.append(_result(model, place, block, names))
        else:
            rest.append(_as_text(block, place))
    content = BLOCKS.read(rest, f"{where}.content")
    if results and not content.text and not content.images:
        return results
    return [*results, content.message(model, f"{where}.content", turn.role)]


def _result(model: OpenModel, where: str, block: Part, names: dict[str, str]) -> Message:
    value = block.get("content")
    if isinstance(value, list):
        value = [_as_text(part, f"{where}.content[{index}]") for index, part in enumerate(value)]
    content = BLOCKS.read(value, f"{where}.content")
    if block.get("is_error") and not content.text:
        content = Content("The tool failed.")
    message = content.message(model, f"{where}.content", "tool")
    message.tool_call_id = text_field(block, "tool_use_id", where)
    message.tool_name = names.get(message.tool_call_id, "")
    return message


def _as_text(block: Any, where: str) -> Any:
    """Documents and search results as the texts that they hold; other blocks as they are."""
    kind = _kind(block)
    if kind == "document":
        return {"type": "text", "text": _titled(block, _document(block, where))}
    if kind == "search_result":
        return {"type": "text", "text": _titled(block, BLOCKS.read(block.get("content"), f"{where}.content").text)}
    return block


def _titled(block: Part, text: str) -> str:
    title = block.get("title")
    return f"{title}\n{text}" if isinstance(title, str) and title else text


def _kind(block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    return kind if isinstance(kind, str) else ""


def _offer(model: OpenModel, tools: Sequence[dict[str, Any]], choice: ToolChoice) -> Offer:
    if choice.type not in ("auto", "none", "any", "tool"):
        raise InvalidRequest('tool_choice.type must be "auto", "none", "any" or "tool"')
    definitions = []
    for index, tool in enumerate(tools):
        kind = tool.get("type")
        if kind not in (None, "custom"):
            warn_once("tools", f"tools of type '{str(kind)[:80]}' are left out: only those with a schema of their own")
            continue
        function: dict[str, Any] = {"name": text_field(tool, "name", f"tools[{index}]")}
        if tool.get("description") is not None:
            function["description"] = tool["description"]
        schema = tool.get("input_schema")
        if tool.get("strict") is True:
            function["strict"] = True
        function["parameters"] = schema if isinstance(schema, dict) else {"type": "object", "properties": {}}
        definitions.append({"type": "function", "function": function})
    if choice.type == "none":
        return Offer([])
    offer = Offer(tools_of(model, definitions))
    if choice.type == "auto":
        return offer
    return offer.force(choice.name if choice.type == "tool" else None, "tool_choice")
