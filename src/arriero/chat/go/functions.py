"""The functions of Go's templates that chat templates call."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

from arriero.chat.go.values import Struct, plain, to_json, truth, written
from arriero.errors import TemplateError

_VERB = re.compile(r"%(?P<flags>[-+# 0]*)(?P<width>\d{0,3})(?:\.(?P<precision>\d{1,3}))?(?P<verb>.)", re.DOTALL)
_TYPESCRIPT = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "array": "any[]",
    "object": "Record<string, any>",
    "null": "null",
}


def _equal(first: Any, *others: Any) -> bool:
    if not others:
        raise TemplateError("eq compares at least two values")
    return any(plain(first) == plain(other) for other in others)


def _ordered(name: str, compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    def ordered(left: Any, right: Any) -> bool:
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if not numbers and not (isinstance(left, str) and isinstance(right, str)):
            raise TemplateError(
                f"{name} compares two numbers or two texts, not {written(left)!r} and {written(right)!r}"
            )
        return compare(left, right)

    return ordered


def _length(value: Any) -> int:
    if isinstance(value, str):
        return len(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, list | dict):
        return len(value)
    raise TemplateError(f"len was asked of {written(value)[:40]!r}, which has no length")


def _index(value: Any, *keys: Any) -> Any:
    for key in keys:
        if isinstance(value, list) and isinstance(key, int) and not isinstance(key, bool):
            if not 0 <= key < len(value):
                raise TemplateError(f"index {key} is out of a list of {len(value)}")
            value = value[key]
        elif isinstance(value, dict):
            value = value.get(key)
        else:
            raise TemplateError(f"index {written(key)!r} was asked of {written(value)[:40]!r}")
    return value


def _slice(value: Any, *bounds: Any) -> Any:
    if not isinstance(value, str | list) or len(bounds) > 2 or not all(type(bound) is int for bound in bounds):
        raise TemplateError("slice takes a list or a text and at most two numbers")
    start = bounds[0] if bounds else 0
    end = bounds[1] if len(bounds) > 1 else len(value)
    if not 0 <= start <= end <= len(value):
        raise TemplateError(f"slice {start}:{end} is out of {len(value)}")
    return value[start:end]


def _printf(layout: Any, *values: Any) -> str:
    if not isinstance(layout, str):
        raise TemplateError("printf takes a text of the layout first")
    waiting = list(values)

    def fill(found: re.Match[str]) -> str:
        verb = found["verb"]
        if verb == "%":
            return "%"
        if not waiting or verb not in "svdqtfg":
            raise TemplateError(f"printf doesn't know what to do for {found[0]!r}; known are %s %v %d %q %t %f %g")
        value = waiting.pop(0)
        if verb in "fg":
            text = f"{float(value):.{found['precision'] or 6}{verb}}"
        else:
            text = to_json(written(value)) if verb == "q" else written(value)
        fill_with = "0" if "0" in found["flags"] and verb in "dfg" else " "
        width = int(found["width"] or 0)
        return text.ljust(width) if "-" in found["flags"] else text.rjust(width, fill_with)

    return _VERB.sub(fill, layout)


def _print(*values: Any) -> str:
    """Values in a row, a space between two of which neither is text."""
    parts: list[str] = []
    for index, value in enumerate(values):
        if index and not isinstance(value, str) and not isinstance(values[index - 1], str):
            parts.append(" ")
        parts.append(written(value))
    return "".join(parts)


def _typescript(value: Any) -> str:
    if not isinstance(value, Struct) or value.kind != "schema":
        return "any"
    if value.plain.get("anyOf"):
        return " | ".join(_typescript(option) for option in value.field("AnyOf"))
    kinds = value.plain.get("type") or []
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return " | ".join(_TYPESCRIPT.get(str(kind), "any") for kind in kinds) or "any"


def _date(days: int) -> Callable[..., str]:
    return lambda *_layout: (datetime.now() + timedelta(days=days)).strftime("%Y-%m-%d")


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    # Both look at no more values than they need, which the interpreter sees to.
    "and": lambda *values: next((value for value in values if not truth(value)), values[-1]),
    "or": lambda *values: next((value for value in values if truth(value)), values[-1]),
    "not": lambda value: not truth(value),
    "eq": _equal,
    "ne": lambda left, right: not _equal(left, right),
    "lt": _ordered("lt", lambda left, right: left < right),
    "le": _ordered("le", lambda left, right: left <= right),
    "gt": _ordered("gt", lambda left, right: left > right),
    "ge": _ordered("ge", lambda left, right: left >= right),
    "len": _length,
    "index": _index,
    "slice": _slice,
    "print": _print,
    "println": lambda *values: " ".join(written(value) for value in values) + "\n",
    "printf": _printf,
    "json": to_json,
    "currentDate": _date(0),
    "yesterdayDate": _date(-1),
    "toTypeScriptType": _typescript,
}
