"""A Jinja environment whose templates can't run for ever or fill the memory.

Jinja's immutable sandbox keeps a template away from Python's internals. What it doesn't limit is work: this environment
counts every loop, call, filter, operator and output against a budget of time and size, and refuses beforehand each
operation whose result could be much larger than what goes in (repetition, padding, joining, replacing, formatting).
Single operations are thereby short, so the clock is looked at often enough to stop every loop.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar, Token
from string import Formatter
from types import TracebackType
from typing import Any, Self, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, _PassArg
from jinja2.visitor import NodeTransformer

MAX_TEXT = 1 << 24
"""Characters of a prompt, and of any string on the way to it (more than four million tokens)."""
MAX_TOTAL = 1 << 31
"""Characters of all strings made during one rendering."""
MAX_COUNT = 1_000_000
"""Elements of a list that is made, and largest integer that a filter or method takes."""
MAX_COPIED = 1 << 30
"""Characters that one operation may move about."""
MAX_BITS = 8192
"""Size of an integer."""
_HUGE_FIELD = re.compile(r"[0-9]{5,}")
_PERCENT = re.compile(r"%(?:\([^)]*\))?([-+ #0-9.*]*)")
"""A printf-style field's flags, width and precision."""


class LimitReached(Exception):
    """A template wanted more time or memory than it may have."""


class Budget:
    """Time and size left to one rendering; current while the `with` block runs."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._deadline = 0.0
        self._total = 0
        self._token: Token[Budget] | None = None

    def __enter__(self) -> Self:
        self._deadline = time.monotonic() + self._seconds
        self._token = _current.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._token is not None
        _current.reset(self._token)

    def step(self) -> None:
        """One unit of work; raises LimitReached when the time is over."""
        if time.monotonic() > self._deadline:
            raise LimitReached(f"it ran longer than {self._seconds:g} seconds")

    def text(self, size: int) -> None:
        """A string of `size` characters is about to be made, or was made within a known bound."""
        self.step()
        self._total += size
        if size > MAX_TEXT or self._total > MAX_TOTAL:
            raise LimitReached(f"it makes a text of more than {MAX_TEXT} characters")

    def count(self, size: int) -> None:
        """A list of `size` elements is about to be made."""
        self.step()
        if size > MAX_COUNT:
            raise LimitReached(f"it makes a list of more than {MAX_COUNT} elements")

    def spelled(self, value: Any) -> int:
        """An upper bound of the characters of `str(value)` and of its JSON; raises LimitReached when too many."""
        if isinstance(value, str):
            return len(value)
        size, waiting = 0, [value]
        while waiting:
            item = waiting.pop()
            if isinstance(item, str):
                size += len(item) + 8
            else:
                size += 4 * len(item) if isinstance(item, bytes) else 32
            if size > MAX_TEXT:
                raise LimitReached(f"it spells out a value of more than {MAX_TEXT} characters")
            if isinstance(item, Mapping):
                waiting.extend(item.keys())
                waiting.extend(item.values())
            elif isinstance(item, Namespace):
                waiting.append(item._Namespace__attrs)  # its text spells them out
            elif isinstance(item, Collection) and not isinstance(item, str | bytes):
                waiting.extend(item)
        self.step()
        return size


_current: ContextVar[Budget] = ContextVar("template_budget")


class _Metering(NodeTransformer):
    """Sends the iterables of loops, the parts of `~` and what is compared or hashed through filters that count."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - Jinja calls it by the node's class
        self.generic_visit(node)
        assert isinstance(node.iter, nodes.Expr)
        node.iter = _filter(node.iter, "_counted")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), "_concatenated")

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.expr = _filter(node.expr, "_bounded")
        for operand in node.ops:
            operand.expr = _filter(operand.expr, "_bounded")
        return node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filter(node, "_bounded") if node.ctx == "load" else node


def _filter(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with a budget; `filters` and `names` are added to Jinja's own."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(
        self,
        extensions: Sequence[type[Extension]],
        filters: Mapping[str, Callable[..., Any]],
        names: Mapping[str, Callable[..., Any]],
    ) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=_output)
        self.filters.update(filters)
        for name, function in self.filters.items():
            self.filters[name] = _metered(name, function)
        self.filters.update(_counted=_counted, _concatenated=_concatenated, _bounded=_bounded)
        for name in _COMPARING:
            self.tests[name] = _metered(name, cast(Callable[..., Any], self.tests[name]))
        self.globals.update(names)
        # It makes any amount of text out of nothing.
        del self.globals["lipsum"]

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Joins what a macro or a `set` block put out."""
        parts = list(parts)
        _current.get().text(sum(map(len, parts)))
        return "".join(parts)

    def joined(self, template: jinja2.Template, arguments: Mapping[str, Any]) -> str:
        """Render a template of this environment."""
        size, parts = 0, []
        for part in template.generate(dict(arguments)):
            size += len(part)
            if size > MAX_TEXT:
                raise LimitReached(f"the prompt has more than {MAX_TEXT} characters")
            parts.append(part)
        return "".join(parts)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Metering().visit(super()._parse(source, name, filename))
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        budget = _current.get()
        budget.step()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | bytes | int | float):
            args = _check_method(budget, owner, getattr(__obj, "__name__", ""), args, kwargs)
        elif isinstance(owner, list | tuple):
            _bounded(owner)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        layout: str = value.__self__

        @functools.wraps(wrapped)
        def limited(*args: Any, **kwargs: Any) -> str:
            for _, _, spec, _ in Formatter().parse(layout):
                if spec and ("{" in spec or _HUGE_FIELD.search(spec)):
                    raise LimitReached("it formats a field of unknown or huge width")
            budget = _current.get()
            largest = sum(budget.spelled(item) for item in (*args, *kwargs.values()))
            budget.text(len(layout) + layout.count("{") * (largest + 10_000))
            return wrapped(*args, **kwargs)

        return limited


def _output(value: Any) -> Any:
    """What an output expression prints; only containers can be larger than what the template already made."""
    budget = _current.get()
    budget.step()
    budget.spelled(value)
    return value


def _counted(iterable: Any) -> Any:
    """The iterable of a loop."""
    budget = _current.get()
    budget.step()
    if hasattr(iterable, "__next__"):
        return _stepping(iterable, budget)
    return _stepping(iter(iterable), budget) if not hasattr(iterable, "__len__") else _Counted(iterable, budget)


class _Counted:
    """A sized iterable that takes a step for each element (`loop.length` needs the size)."""

    def __init__(self, iterable: Any, budget: Budget) -> None:
        self._iterable = iterable
        self._budget = budget

    def __len__(self) -> int:
        return len(self._iterable)

    def __iter__(self) -> Iterator[Any]:
        return _stepping(iter(self._iterable), self._budget)


def _stepping(iterator: Iterator[Any], budget: Budget) -> Iterator[Any]:
    for item in iterator:
        budget.step()
        yield item


def _concatenated(parts: list[Any]) -> str:
    """The `~` operator."""
    budget = _current.get()
    budget.text(sum(budget.spelled(part) for part in parts))
    return "".join(map(str, parts))


def _bounded(value: Any) -> Any:
    """A value that is compared or hashed: few lists, each twice in the next one, can be as long as one likes."""
    if isinstance(value, list | tuple | dict):
        _current.get().spelled(value)
    return value


def _check_operator(operator: str, left: Any, right: Any) -> None:
    budget = _current.get()
    budget.step()
    if operator == "%":
        if isinstance(left, str | bytes):
            _check_layout(budget, left, right)
        return
    integers = isinstance(left, int) and isinstance(right, int)
    if operator == "**":
        if integers and right > 0 and left.bit_length() * right > MAX_BITS:
            raise LimitReached("it makes a huge number")
        return
    if operator == "*":
        if integers:
            if left.bit_length() + right.bit_length() > MAX_BITS:
                raise LimitReached("it makes a huge number")
            return
        for sequence, times in ((left, right), (right, left)):
            if isinstance(times, int) and isinstance(sequence, str | bytes | list | tuple):
                size = len(sequence) * max(times, 0)
                (budget.text if isinstance(sequence, str | bytes) else budget.count)(size)
        return
    if isinstance(left, str | bytes) and isinstance(right, str | bytes):
        budget.text(len(left) + len(right))
    elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
        budget.count(len(left) + len(right))


def _check_layout(budget: Budget, layout: str | bytes, values: Any) -> None:
    """printf-style formatting: no width from outside, and none of more than four digits."""
    text = layout.decode("latin-1") if isinstance(layout, bytes) else layout
    if any("*" in spec or _HUGE_FIELD.search(spec) for spec in _PERCENT.findall(text)):
        raise LimitReached("it formats a field of unknown or huge width")
    budget.text(len(text) + text.count("%") * (budget.spelled(values) + 10_000))


def _check_method(
    budget: Budget, owner: str | bytes | int | float, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """Bound what a method of a plain value may make; returns its arguments, with an iterator to join as a list."""
    values = (*args, *kwargs.values())
    _check_counts(values)
    if isinstance(owner, int | float):
        return args
    if name in ("encode", "decode") and not _CODECS.issuperset(item for item in values[:1] if isinstance(item, str)):
        raise LimitReached(f"it asks for the encoding {values[0]!r:.20}; known are {', '.join(sorted(_CODECS))}")
    if name == "join" and args:
        parts = list(_stepping(iter(args[0]), budget))
        budget.text(sum(budget.spelled(part) for part in parts) + len(owner) * len(parts))
        return (parts, *args[1:])
    if name == "replace" and len(args) >= 2:
        _check_replace(budget, owner, args[0], args[1])
    elif name == "expandtabs":
        width = next((item for item in values if isinstance(item, int)), 8)
        budget.text(len(owner) + _occurrences(owner, "\t") * max(width, 0))
    elif name == "translate" and args:
        table = args[0]
        longest = max(map(budget.spelled, table.values()), default=1) if isinstance(table, Mapping) else 1
        budget.text(len(owner) * longest)
    return args


def _check_counts(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and value > MAX_COUNT:
            raise LimitReached(f"it asks for a width or count of {value:.3g}, more than {MAX_COUNT}")


def _check_wrap(text: str, width: int) -> None:
    """Wrapping copies what is left of a word for each line that it fills."""
    longest = max(map(len, text.split()), default=0)
    if longest * longest // max(width, 1) > MAX_COPIED:
        raise LimitReached(f"it wraps a word of {longest} characters")


def _check_replace(budget: Budget, text: Any, old: Any, new: Any) -> None:
    if isinstance(text, str | bytes) and isinstance(old, type(text)) and isinstance(new, type(text)):
        budget.text(len(text) + _occurrences(text, old) * len(new))


def _occurrences(text: str | bytes, part: str | bytes) -> int:
    if isinstance(text, str) and isinstance(part, str):
        return text.count(part)
    as_bytes = part.encode() if isinstance(part, str) else part
    return text.count(as_bytes) if isinstance(text, bytes) else 0


_STRUCTURAL = frozenset(
    "list map select reject selectattr rejectattr first last length count default d items batch slice reverse attr "
    "random".split()
)
"""Filters that neither spell out nor compare their values."""
_COMPARING = "eq == equalto ne != lt < lessthan le <= gt > greaterthan ge >= in".split()
"""Tests that compare."""
_CODECS = frozenset(("utf-8", "utf8", "ascii", "latin-1"))
"""Encodings whose work is in proportion to the text."""


def _metered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that checks its arguments against the budget before it runs."""
    skip = 0 if _PassArg.from_obj(function) is None else 1

    @functools.wraps(function)
    def filtered(*args: Any, **kwargs: Any) -> Any:
        budget = _current.get()
        budget.step()
        head, values = args[:skip], list(args[skip:])
        _check_counts((*values[1:], *kwargs.values()))
        if name not in _STRUCTURAL and values:
            if hasattr(values[0], "__next__"):
                values[0] = list(_stepping(values[0], budget))
            _check_filter(budget, name, values, kwargs)
        result = function(*head, *values, **kwargs)
        if isinstance(result, str):
            budget.text(len(result))
        return result

    return filtered


def _check_filter(budget: Budget, name: str, values: list[Any], kwargs: dict[str, Any]) -> None:
    value, others = values[0], [*values[1:], *kwargs.values()]
    size = budget.spelled(value)
    if name == "join":
        separator = max((len(item) for item in others if isinstance(item, str)), default=0)
        count = len(value) if hasattr(value, "__len__") else 0
        budget.text(size + separator * count)
    elif name in ("indent", "wordwrap", "tojson"):
        if name == "wordwrap":
            _check_wrap(str(value), next((item for item in others if isinstance(item, int)), 79))
        # Each of at most `size` lines or elements may be led by the longest of the arguments.
        widest = max((item if isinstance(item, int) else budget.spelled(item) for item in others), default=4)
        lines = value.count("\n") + 1 if name == "indent" and isinstance(value, str) else size
        if name != "wordwrap" or any(isinstance(item, str) for item in others):
            budget.text(size + lines * max(widest if name != "tojson" or widest > 8 else 0, 0))
    elif name == "replace" and len(others) >= 2:
        _check_replace(budget, str(value), str(others[0]), str(others[1]))
    elif name == "format":
        _check_layout(budget, str(value), tuple(others))
    elif name == "sum" and any(not isinstance(item, int | float | str) for item in others):
        raise LimitReached("it adds up lists")
