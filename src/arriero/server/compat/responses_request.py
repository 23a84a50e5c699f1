"""Items of OpenAI's responses → the neutral conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from arriero.chat.messages import Message, ToolCall
from arriero.errors import InvalidRequest
from arriero.server.compat.fields import warn_once
from arriero.server.compat.openai_request import image_url
from arriero.server.compat.parts import Part, PartKinds, text_field
from arriero.server.models import OpenModel

Item = dict[str, Any]

OUR_THOUGHTS = "arriero:"
"""In front of the `encrypted_content` that we hand out, which is the thoughts themselves; that of others is opaque."""

PARTS = PartKinds(
    texts={"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal", "summary_text": "text"},
    images={"input_image": image_url, "image_url": image_url},
    ignored={},
    refused={
        "input_file": "send the file's text, or its pages as images",
        "input_audio": "models here don't hear",
        "computer_screenshot": "send it as an input_image",
        "encrypted_content": "only the hosted service can read it",
    },
)

LEFT_OUT = frozenset(
    {
        *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"),
        *("computer_call", "computer_call_output", "tool_search_call", "tool_search_output", "additional_tools"),
        *("mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "mcp_call", "program", "program_output"),
        *("configuration_update", "compaction", "compaction_trigger"),
    }
)
"""Items that concern the hosted service alone: they are left out with a warning."""

_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
_ACTIONS = {
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
    "apply_patch_call": ("apply_patch", "operation"),
}
"""Calls of tools that the client runs, with the name and the field that say what was called."""
_OUTPUTS = frozenset(
    {
        *("function_call_output", "custom_tool_call_output"),
        *("local_shell_call_output", "shell_call_output", "apply_patch_call_output"),
    }
)
KNOWN = frozenset({"message", "reasoning", "item_reference", *_CALLS, *_ACTIONS, *_OUTPUTS, *LEFT_OUT})
"""All kinds of items that are understood."""


def items_of(value: Any) -> list[Item]:
    """The `input` as items: a text is one message of the user."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        return value
    raise InvalidRequest("input must be a string or a list of items")


def listed(item: Item, index: int) -> Item:
    """An item of a history as a listing shows it: with an id and a status, and texts as parts."""
    shown: Item = {"id": f"item_{index}", "status": "completed"} | {"type": "message"} | item
    if shown["type"] == "message" and isinstance(shown.get("content"), str):
        own = shown.get("role") == "assistant"
        part: Part = {"type": "output_text", "annotations": []} if own else {"type": "input_text"}
        shown["content"] = [part | {"text": shown["content"]}]
    return shown


class _Turns:
    """Messages under construction: what the model wrote between two inputs is one message of it."""

    def __init__(self, model: OpenModel) -> None:
        self.model = model
        self.messages: list[Message] = []
        self.names: dict[str, str] = {}
        self._own: Message | None = None

    def put(self, message: Message) -> None:
        """A message that isn't the model's."""
        self.messages.append(message)
        self._own = None

    def thought(self, text: str) -> None:
        """Thoughts go before what follows them; between calls of one turn they join those before."""
        own = self._own
        if own is None or (own.content and not own.tool_calls):
            own = self._begin()
        own.thinking += ("\n" if own.thinking and text else "") + text

    def said(self, message: Message) -> None:
        """A message of the model: a text after calls joins them, after another text it is a message of its own."""
        own = self._own
        if own is None or (own.content and not own.tool_calls):
            own = self._begin()
        own.content += ("\n" if own.content and message.content else "") + message.content
        own.images += message.images

    def called(self, call: ToolCall) -> None:
        """A call joins what the model said before it."""
        own = self._own or self._begin()
        own.tool_calls = [*own.tool_calls, call]
        self.names[call.id] = call.name

    def _begin(self) -> Message:
        self._own = Message(role="assistant")
        self.messages.append(self._own)
        return self._own


def messages_of(model: OpenModel, items: Sequence[Item]) -> list[Message]:
    """The conversation; raises InvalidRequest naming the item that can't be read."""
    turns = _Turns(model)
    for index, item in enumerate(items):
        _add(turns, item, f"input[{index}]")
    if not turns.messages:
        raise InvalidRequest("input is empty: at least one message is needed")
    return turns.messages


def _add(turns: _Turns, item: Item, where: str) -> None:
    kind = item.get("type") or ("message" if item.get("role") else "")
    if not isinstance(kind, str):
        raise InvalidRequest(f"{where}.type must be a string")
    if kind == "message":
        role = text_field(item, "role", where).lower()
        joint = "" if role == "assistant" else "\n"
        message = PARTS.read(item.get("content"), f"{where}.content", joint).message(turns.model, where, role)
        if role == "assistant":
            turns.said(message)
        else:
            turns.put(message)
    elif kind == "reasoning":
        turns.thought(_thoughts(item, where))
    elif kind in _CALLS:
        turns.called(_call(item, where, _CALLS[kind]))
    elif kind in _ACTIONS:
        name, field = _ACTIONS[kind]
        action = item.get(field)
        arguments = action if isinstance(action, dict) else {}
        turns.called(ToolCall(name=name, arguments=arguments, id=str(item.get("call_id") or item.get("id") or "")))
    elif kind in _OUTPUTS:
        turns.put(_result(turns, item, where))
    elif kind in LEFT_OUT:
        warn_once("input", f"items of type '{kind}' are left out: they concern the hosted service alone")
    elif kind:
        raise InvalidRequest(f"{where}: unknown input item type: {kind[:80]!r}")
    else:
        raise InvalidRequest(f"{where}: input item missing required 'type' field")


def _thoughts(item: Item, where: str) -> str:
    for field in ("content", "summary"):
        parts = item.get(field)
        if isinstance(parts, list):
            text = "\n".join(str(part.get("text") or "") for part in parts if isinstance(part, dict))
            if text:
                return text
    sealed = item.get("encrypted_content")
    if isinstance(sealed, str) and sealed.startswith(OUR_THOUGHTS):
        return sealed.removeprefix(OUR_THOUGHTS)
    return ""


def _call(item: Item, where: str, field: str) -> ToolCall:
    name, namespace = text_field(item, "name", where), item.get("namespace")
    value = item.get(field)
    arguments: Any = value if isinstance(value, dict | str) else {}
    return ToolCall(
        name=f"{namespace}.{name}" if isinstance(namespace, str) and namespace else name,
        arguments={"input": arguments} if field == "input" else arguments,
        id=text_field(item, "call_id", where),
    )


def _result(turns: _Turns, item: Item, where: str) -> Message:
    output = item.get("output")
    if isinstance(output, list) and item["type"] == "shell_call_output":
        parts = [part for part in output if isinstance(part, dict)]
        output = "\n".join(f"{part.get('stdout') or ''}{part.get('stderr') or ''}" for part in parts)
    message = PARTS.read(output, f"{where}.output").message(turns.model, f"{where}.output", "tool")
    message.tool_call_id = str(item.get("call_id") or item.get("id") or "")
    message.tool_name = turns.names.get(message.tool_call_id, "")
    return message


def definitions_of(tools: Sequence[Part]) -> list[dict[str, Any]]:
    """Tools in the form of chat completions; the functions of a namespace are called `namespace.function`."""
    found: list[dict[str, Any]] = []
    for index, tool in enumerate(tools):
        kind = tool.get("type")
        if kind == "namespace" and isinstance(tool.get("tools"), list):
            space = text_field(tool, "name", f"tools[{index}]")
            members = [member for member in tool["tools"] if isinstance(member, dict)]
            place = f"tools[{index}].tools"
            found += definitions_of([one | {"name": f"{space}.{text_field(one, 'name', place)}"} for one in members])
        elif kind in (None, "function"):
            inner = tool.get("function")
            found.append({"type": "function", "function": inner if isinstance(inner, dict) else _function(tool)})
        else:
            found.append(tool)
    return found


def _function(tool: Part) -> dict[str, Any]:
    names = ("name", "description", "parameters")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return function | ({"strict": True} if tool.get("strict") is True else {})


def namespaces_of(tools: Sequence[Part]) -> frozenset[str]:
    """The namespaces among the tools."""
    return frozenset(str(tool.get("name")) for tool in tools if tool.get("type") == "namespace")
