"""Calls written as Python: `[f(a="x"), g()]`."""

from __future__ import annotations

import ast
import math
from typing import Any

from arriero.chat.messages import ToolCall
from arriero.chat.parsers.marks import BREAK
from arriero.chat.parsers.syntax import Done, Failed, Outcome

_MOST = 1 << 16
"""Characters that are given to Python's parser."""


class PythonicReader:
    """A list of calls, or one call a line, up to the closing tag."""

    def __init__(self, start: int, closing: str) -> None:
        self._start = self._at = start
        self._closing = closing

    def read(self, text: str) -> Outcome:
        while True:
            closing = text.find(self._closing, self._at)
            if closing < 0:
                self._at = max(self._at, len(text) - len(self._closing) + 1)
                return None
            calls = calls_of(text[self._start : closing])
            return Failed() if calls is None else Done(closing + len(self._closing), calls)

    def finish(self, text: str) -> Outcome:
        calls = calls_of(text[self._start :])
        return Failed() if calls is None else Done(len(text), calls)


def calls_of(text: str) -> tuple[ToolCall, ...] | None:
    """The calls that a text of Python holds, values being literals; None when it holds anything else."""
    if len(text) > _MOST:
        return None
    try:
        # Python's parser takes no half of a surrogate pair, and needs no break.
        module = ast.parse(text.replace(BREAK, "").strip(), mode="exec")
        found: list[ToolCall] = []
        for statement in module.body:
            if not isinstance(statement, ast.Expr):
                return None
            nodes = statement.value.elts if isinstance(statement.value, ast.List) else [statement.value]
            found += [_call(node) for node in nodes]
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None
    return tuple(found) or None


def _call(node: ast.expr) -> ToolCall:
    """Raises ValueError for what is no call with named literal arguments."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError(node)
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError(keyword)
        arguments[keyword.arg] = _plain(_literal(keyword.value))
    return ToolCall(name=ast.unparse(node.func), arguments=arguments)


def _literal(node: ast.expr) -> Any:
    # JSON's words are names in Python.
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[node.id]
    return ast.literal_eval(node)


def _plain(value: Any) -> Any:
    """The value as JSON has it; raises ValueError for one that JSON can't hold."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise ValueError(value)
