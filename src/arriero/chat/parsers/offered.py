"""The tools on offer, and what their schemas say of a value that a model wrote as text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from arriero.chat.messages import Tool

_DEPTH = 8
"""Unions and references inside each other that are looked into."""


class OfferedTools:
    """Names and parameters of the tools that the model may call; knows nothing of how calls are written."""

    def __init__(self, tools: Iterable[Tool] = ()) -> None:
        self._properties: dict[str, Mapping[str, Any]] = {}
        self._roots: dict[str, Mapping[str, Any]] = {}
        """What references in a tool's schema are relative to."""
        for tool in tools:
            function = tool.definition.get("function")
            parameters = function.get("parameters") if isinstance(function, dict) else None
            properties = parameters.get("properties") if isinstance(parameters, dict) else None
            self._properties[tool.name] = properties if isinstance(properties, dict) else {}
            self._roots[tool.name] = parameters if isinstance(parameters, dict) else {}

    def __bool__(self) -> bool:
        return bool(self._properties)

    def __contains__(self, name: object) -> bool:
        return name in self._properties

    def parameters(self, name: str) -> list[str]:
        """Names of a tool's parameters, in order; none of a tool that isn't offered."""
        return list(self._properties.get(name, ()))

    def types(self, name: str, parameter: str) -> frozenset[str]:
        """JSON types that a parameter may have; empty when its schema doesn't say."""
        return frozenset(_types(self._properties.get(name, {}).get(parameter), self._roots.get(name, {}), _DEPTH))

    def value(self, name: str, parameter: str, text: str) -> Any:
        """The value that a model wrote as bare text, in the first declared type that it fits, else the text itself.

        A parameter that may only be a string is the text exactly, whatever it looks like; so is one without a declared
        type.
        """
        return typed(text, self.types(name, parameter))


def typed(text: str, types: frozenset[str]) -> Any:
    """`text` as one of `types`, tried as null, boolean, integer, number, array, object; else unchanged."""
    bare = text.strip()
    word = bare.lower()
    if "null" in types and word in ("null", "none"):
        return None
    if "boolean" in types and word in ("true", "false"):
        return word == "true"
    if types & {"integer", "number", "array", "object"}:
        if "string" not in types and word in ("null", "none"):
            return None
        value = _read(bare)
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            value = int(value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            if "number" in types or ("integer" in types and isinstance(value, int)):
                return value
        elif (isinstance(value, list) and "array" in types) or (isinstance(value, dict) and "object" in types):
            return value
    return text


def _read(text: str) -> Any:
    """The JSON value of a text; None when it is none."""
    try:
        return json.loads(text, strict=False, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(name: str) -> float:
    """JSON has no NaN and no infinity: no client could read them back."""
    raise ValueError(name)


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> set[str]:
    if not isinstance(schema, dict) or depth == 0:
        return set()
    if isinstance(schema.get("$ref"), str):
        return _types(_at(root, schema["$ref"]), root, depth - 1)
    declared = schema.get("type")
    found = {declared} if isinstance(declared, str) else set()
    if isinstance(declared, list):
        found = {item for item in declared if isinstance(item, str)}
    for union in ("anyOf", "oneOf", "allOf"):
        options = schema.get(union)
        for option in options if isinstance(options, list) else ():
            found |= _types(option, root, depth - 1)
    if not found:
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        found = {_type_of(value) for value in values} if isinstance(values, list) else set()
    if found and schema.get("nullable") is True:
        found.add("null")
    return {item.lower() for item in found}


def _at(root: Mapping[str, Any], reference: str) -> Any:
    """What a reference within a schema leads to; None where it leads nowhere."""
    found: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, dict) else None
    return found if reference.startswith("#") else None


def _type_of(value: Any) -> str:
    """The JSON type of a value."""
    if isinstance(value, bool):
        return "boolean"
    kinds = {str: "string", int: "integer", float: "number", list: "array", dict: "object", type(None): "null"}
    return kinds[type(value)]
