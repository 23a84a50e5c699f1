"""What a JSON schema says, for notations of values that are not JSON: one level at a time, or why it can't be kept."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from arriero import grammar
from arriero.chat.calls.rules import regex
from arriero.errors import InvalidRequest

Schema = Mapping[str, Any]

TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
_NOTES = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema"}
_NOTES |= {"$id", "$defs", "definitions", "x-guidance"}
_KEYWORDS = {
    "string": {"minLength", "maxLength", "pattern"},
    "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_COUNTS = {"minLength", "maxLength", "minItems", "maxItems"}
_DEPTH = 16
_MOST = 64
"""Alternatives of one value."""


def unenforceable(keyword: str) -> InvalidRequest:
    """The error for a keyword that the notation of a family's calls can't keep."""
    return InvalidRequest(f"the keyword '{keyword}' is not supported in the calls of this model")


class Schemas:
    """One schema and what its references mean."""

    def __init__(self, root: Schema) -> None:
        self._root = root

    def of(self, schema: Any) -> Schema:
        """A schema, its reference followed; InvalidRequest for one that leads nowhere."""
        for _ in range(_DEPTH):
            if schema is True:
                return {}
            if not isinstance(schema, dict):
                raise unenforceable("false" if schema is False else "schema")
            if "$ref" not in schema:
                _check(schema)
                return schema
            if set(schema) - _NOTES - {"$ref"}:
                raise unenforceable(f"{min(set(schema) - _NOTES - {'$ref'})} beside $ref")
            schema = self._at(schema["$ref"])
        raise unenforceable("$ref")

    def alternatives(self, schema: Any, depth: int = 0) -> list[Schema]:
        """What a value may be, each of one type, or of an `enum` or `const`; every type where none is declared."""
        found = self.of(schema)
        if depth > _DEPTH:
            raise unenforceable("$ref")
        if "const" in found or "enum" in found:
            kept = _NOTES | {"const", "enum", "type"}
            if set(found) - kept:
                raise unenforceable(min(set(found) - kept))
            return [found]
        for union in ("anyOf", "oneOf"):
            if union not in found:
                continue
            kept = _NOTES | {union}
            if set(found) - kept:
                raise unenforceable(f"{min(set(found) - kept)} beside {union}")
            branches = [self.alternatives(branch, depth + 1) for branch in found[union]]
            if union == "oneOf" and not _apart(branches):
                raise unenforceable("oneOf")
            flat = [one for branch in branches for one in branch]
            if len(flat) > _MOST:
                raise unenforceable(union)
            return flat
        declared = found.get("type", list(TYPES))
        types = declared if isinstance(declared, list) else [declared]
        if not types or any(name not in TYPES for name in types):
            raise unenforceable("type")
        known = _NOTES | {"type"} | {word for name in types for word in _keywords(name)}
        if set(found) - known:
            raise unenforceable(min(set(found) - known))
        return [{"type": name} | {word: found[word] for word in _keywords(name) if word in found} for name in types]

    def json(self, schema: Schema) -> dict[str, Any]:
        """A schema by itself, with what it may refer to; InvalidRequest where it can't be kept as JSON."""
        whole = {**schema, **{name: self._root[name] for name in ("$defs", "definitions") if name in self._root}}
        grammar.check("json_schema", json.dumps(whole))
        return whole

    def _at(self, reference: Any) -> Any:
        parts = reference.split("/") if isinstance(reference, str) else []
        found: Any = self._root
        if parts[:1] != ["#"]:
            raise unenforceable("$ref")
        for part in parts[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or name not in found:
                raise unenforceable("$ref")
            found = found[name]
        return found


def _check(schema: Schema) -> None:
    """Raise InvalidRequest for a keyword whose value is of no form that schemas have."""
    for word, value in schema.items():
        if word in _COUNTS:
            good = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        elif word in ("anyOf", "oneOf", "enum"):
            good = isinstance(value, list) and value != []
        elif word == "required":
            good = isinstance(value, list) and all(isinstance(name, str) for name in value)
        else:
            good = word != "properties" or isinstance(value, dict)
        if not good:
            raise InvalidRequest(f"the keyword '{word}' can't be {json.dumps(value)[:60]}")


def constants(schema: Schema) -> list[Any] | None:
    """The values that a schema names one by one, None where it doesn't."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def properties(schema: Schema) -> Iterator[tuple[str, Any, bool]]:
    """Name, schema and whether it is required, of each property; InvalidRequest for a required one that is unknown."""
    named, required = schema.get("properties", {}), schema.get("required", [])
    if set(required) - set(named):
        raise unenforceable("required")
    for name, inner in named.items():
        yield name, inner, name in required


def any_string(schema: Schema) -> bool:
    """Whether every string fits a schema of strings."""
    return not any(word in schema for word in _KEYWORDS["string"])


def string_expression(schema: Schema, without: str = "") -> str:
    """Lark's expression for the strings of a schema, which hold none of the characters `without`."""
    low, high = schema.get("minLength", 0), schema.get("maxLength")
    char = f"[^{re.escape(without)}]" if without else "."
    count = "*" if not low and high is None else f"{{{low},{'' if high is None else high}}}"
    found = regex(f"(?s:{char}{count})")
    pattern = schema.get("pattern")
    if pattern is None:
        return found
    if not isinstance(pattern, str) or _bar(pattern):
        raise unenforceable("pattern")
    start, end = not pattern.startswith("^"), not pattern.endswith("$") or pattern.endswith("\\$")
    inner = pattern[0 if start else 1 : None if end else -1]
    whole = f"{'(?s:.*)' if start else ''}(?:{inner}){'(?s:.*)' if end else ''}"
    return f"{found} & {regex(whole)}"


def _bar(pattern: str) -> bool:
    """Whether alternatives stand outside of every group, where an anchor may belong to one of them alone."""
    bare = re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]", "", pattern)
    while (inner := re.sub(r"\([^()]*\)", "", bare)) != bare:
        bare = inner
    return "|" in bare


def _keywords(kind: str) -> set[str]:
    return _KEYWORDS.get(kind, _BOUNDS if kind in ("integer", "number") else set())


def _apart(branches: list[list[Schema]]) -> bool:
    """Whether no value fits two branches, as far as types and named values show."""
    seen: list[set[str]] = []
    for branch in branches:
        kinds: set[str] = set()
        for one in branch:
            values = constants(one)
            names = [one["type"]] if values is None else [f"={json.dumps(value, sort_keys=True)}" for value in values]
            kinds |= {"number" if name == "integer" else name for name in names}
        if any(kinds & other for other in seen):
            return False
        seen.append(kinds)
    # A named value may be of a type that another branch takes whole.
    named = [any(kind.startswith("=") for kind in kinds) for kinds in seen]
    return all(named) or not any(named)
