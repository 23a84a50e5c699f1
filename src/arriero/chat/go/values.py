"""Values as Go's templates see them: which are true, how they are written, and the fields of messages and tools."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from arriero.errors import TemplateError

_MESSAGE = {
    "Role": "role",
    "Content": "content",
    "Thinking": "thinking",
    "Images": "images",
    "ToolCalls": "tool_calls",
    "ToolName": "tool_name",
    "ToolCallID": "tool_call_id",
}
_CALL = {"ID": "id", "Function": "function"}
_CALLED = {"Name": "name", "Arguments": "arguments", "Index": "index"}
_TOOL = {"Type": "type", "Items": "items", "Function": "function"}
_FUNCTION = {"Name": "name", "Description": "description", "Parameters": "parameters"}
_SCHEMA = {
    "Type": "type",
    "Properties": "properties",
    "Required": "required",
    "Items": "items",
    "Defs": "$defs",
    "Description": "description",
    "Enum": "enum",
    "AnyOf": "anyOf",
}


class Struct:
    """An object whose fields have Go's names, with the JSON that it stands for."""

    def __init__(self, kind: str, names: Mapping[str, str], values: Mapping[str, Any], plain: Any) -> None:
        """`values` by JSON name; `plain` is what it is written as."""
        self.kind = kind
        self.plain = plain
        self._names = names
        self._values = values

    def field(self, name: str) -> Any:
        """A field's value, '' where the object has none; raises TemplateError for an unknown field."""
        if name not in self._names:
            raise TemplateError(f".{name} is no field of a {self.kind}; it has {', '.join(sorted(self._names))}")
        return self._values.get(self._names[name], "")


def message(found: Mapping[str, Any]) -> Struct:
    """A message as templates are given it."""
    calls = [_call(call, index) for index, call in enumerate(found.get("tool_calls") or [])]
    plain = {"role": found["role"], "content": found.get("content") or ""} | {
        key: found[key] for key in ("thinking", "tool_calls", "tool_name", "tool_call_id") if found.get(key)
    }
    values = {
        **plain,
        "thinking": found.get("thinking", ""),
        "tool_calls": calls,
        "tool_name": found.get("name", ""),
        "images": [],
    }
    return Struct("message", _MESSAGE, values, plain)


def tool(definition: Mapping[str, Any]) -> Struct:
    """A tool's definition."""
    function = definition.get("function")
    inner = function if isinstance(function, dict) else {}
    fields = {**inner, "parameters": schema(inner.get("parameters") or {})}
    values = {**definition, "function": Struct("function", _FUNCTION, fields, inner)}
    return Struct("tool", _TOOL, values, definition)


def schema(found: Any) -> Any:
    """A JSON schema whose properties are schemas."""
    if not isinstance(found, dict):
        return found
    values = dict(found)
    properties = found.get("properties")
    values["properties"] = (
        {name: schema(item) for name, item in properties.items()} if isinstance(properties, dict) else {}
    )
    if isinstance(found.get("anyOf"), list):
        values["anyOf"] = [schema(item) for item in found["anyOf"]]
    return Struct("schema", _SCHEMA, values, found)


def _call(found: Mapping[str, Any], index: int) -> Struct:
    function = found["function"]
    inner = {"index": index, **function}
    values = {"id": found.get("id", ""), "function": Struct("called function", _CALLED, inner, function)}
    return Struct("call", _CALL, values, found)


def field(value: Any, name: str) -> Any:
    """A field of an object, or what a map holds under a key (None when it has no such key)."""
    if isinstance(value, Struct):
        return value.field(name)
    if isinstance(value, dict):
        return value.get(name)
    raise TemplateError(f".{name} was asked of {written(value)[:40] or 'nothing'!r}, which has no fields")


def plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, Struct):
        return value.plain
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def to_json(value: Any) -> str:
    """Compact JSON, keys in the order in which they were given."""
    return json.dumps(plain(value), ensure_ascii=False, separators=(",", ":"))


def truth(value: Any) -> bool:
    """Whether a value counts as true: an object always does; nothing, zero and what is empty don't."""
    return True if isinstance(value, Struct) else bool(value)


def written(value: Any) -> str:
    """A value as text. Objects, maps and lists of them are written as JSON, other lists as `[a b]`."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, list) and value and all(isinstance(item, str | int | float) or item is None for item in value):
        return f"[{' '.join(written(item) for item in value)}]"
    return to_json(value)


def _float(value: float) -> str:
    """The shortest text of a number, without an exponent up to 1e21 (Go itself writes a million as `1e+06`)."""
    if not math.isfinite(value):
        return {math.inf: "+Inf", -math.inf: "-Inf"}.get(value, "NaN")
    if value and not 1e-4 <= abs(value) < 1e21:
        return repr(float(value)) if "e" in repr(value) else f"{value:e}"
    return str(int(value)) if value.is_integer() else repr(value)
