"""The neutral conversation: what every API is translated to and every renderer starts from."""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec

Think = bool | Literal["low", "medium", "high", "max"] | None
"""Whether, and how hard, the model should think; None leaves it to the template."""


class ToolCall(msgspec.Struct, kw_only=True):
    """A call that the model made."""

    name: str
    arguments: dict[str, Any] | str = {}
    """As the client sent it: an object, or the text of one (OpenAI's form)."""
    id: str = ""

    def mapping(self) -> dict[str, Any] | None:
        """The arguments as an object in the model's key order; None when the text is no JSON object."""
        if isinstance(self.arguments, dict):
            return self.arguments
        if not self.arguments.strip():
            return {}
        try:
            value = json.loads(self.arguments)
        except (ValueError, RecursionError):
            return None
        if value is None:
            return {}
        return value if isinstance(value, dict) else None

    def text(self) -> str:
        """The arguments as JSON text: a client's own text unchanged."""
        if isinstance(self.arguments, str):
            return self.arguments
        return json.dumps(self.arguments, ensure_ascii=False)


class Tool(msgspec.Struct):
    """A tool that the model may call."""

    definition: dict[str, Any]
    """`{"type": "function", "function": {name, description, parameters}}`, whole and in the client's key order."""

    @property
    def name(self) -> str:
        function = self.definition.get("function")
        return str(function.get("name", "")) if isinstance(function, dict) else ""


class Message(msgspec.Struct, kw_only=True):
    """One turn of a conversation, or the result of a call."""

    role: str
    """`system`, `developer`, `user`, `assistant` or `tool`; templates may know others."""
    content: str = ""
    thinking: str = ""
    images: list[bytes] = []
    """Files of pictures, in order."""
    places: list[int] = []
    """Offsets in `content` at which the last images stand, ascending; images without one stand before the text."""
    tool_calls: list[ToolCall] = []
    tool_name: str = ""
    """Of a tool message: the function that it answers."""
    tool_call_id: str = ""


class Conversation(msgspec.Struct, kw_only=True):
    """Messages in order and the tools on offer."""

    messages: list[Message]
    tools: list[Tool] = []
