"""A Go chat template that renders the same arguments as a Jinja one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from arriero.chat.go.functions import FUNCTIONS
from arriero.chat.go.tree import Branch, Call, Jump, Node, Operand, Pipeline, Show, Text, Tree
from arriero.chat.go.values import field, message, tool, truth, written
from arriero.chat.sandbox import Budget, LimitReached
from arriero.chat.template import MAX_SOURCE, TemplateStopped
from arriero.errors import TemplateError

_DEPTH = 50
"""Templates that call each other."""


class GoTemplate:
    """One parsed template.

    A template that never reads `.Messages` is of the old kind, for one exchange: it is written once per exchange, and
    the last time only up to `.Response`.
    """

    def __init__(self, source: str, *, seconds: float = 10.0) -> None:
        """Raises TemplateError with the line for a template that can't be parsed or uses what is unknown here."""
        if len(source) > MAX_SOURCE:
            raise TemplateError(f"the chat template has {len(source)} characters; at most {MAX_SOURCE} are accepted")
        self.source = source
        self._seconds = seconds
        self._tree = Tree(source)
        fields = self._tree.fields()
        self._whole = "Messages" in fields
        if not self._whole and "Response" not in fields:
            pipeline = Pipeline(((Operand("dot", None, ("Response",)),),))
            self._tree.root.append(Show(pipeline))
        names = {"Tools": "tools", "Messages": "messages", "System": "system", "Thinking": "thinking"}
        self.variables = frozenset(names[name] for name in names if name in fields)
        """What it reads, by the names that Jinja templates use."""

    def render(self, arguments: Mapping[str, Any]) -> str:
        """The prompt; raises TemplateError with the line, also when a limit of time or size is reached."""
        messages = _collated(arguments["messages"])
        shared = {
            "Tools": [tool(definition) for definition in arguments.get("tools") or []],
            "Think": bool(arguments.get("enable_thinking", False)),
            "ThinkLevel": arguments.get("reasoning_effort", ""),
            "IsThinkSet": "enable_thinking" in arguments,
            "Response": "",
            "Suffix": "",
        }
        with Budget(self._seconds) as budget:
            try:
                if self._whole:
                    rules = [str(item["content"]) for item in arguments["messages"] if item["role"] == "system"]
                    data = {"System": "\n\n".join(rules), "Messages": [message(item) for item in messages]}
                    return _Run(self._tree, budget, shared | data).text()
                return "".join(self._exchanges(messages, shared, budget, bool(arguments.get("add_generation_prompt"))))
            except LimitReached as error:
                raise TemplateStopped(f"the chat template was stopped: {error}") from error
            except RecursionError as error:
                raise TemplateStopped("the chat template was stopped: it nests too deeply") from error

    def _exchanges(
        self, messages: list[dict[str, Any]], shared: dict[str, Any], budget: Budget, open_end: bool
    ) -> list[str]:
        """Each exchange's text; the last one ends where the model goes on, if `open_end`."""
        found: list[str] = []
        exchange = {"System": "", "Prompt": "", "Response": ""}
        names = {"system": "System", "user": "Prompt", "assistant": "Response"}
        for item in messages:
            name = names.get(item["role"])
            if name is None:
                raise TemplateError(f"the Go template is of the old kind, without a place for the role {item['role']}")
            later = {"System": ("Prompt", "Response"), "Prompt": ("Response",), "Response": ()}[name]
            if any(exchange[other] for other in later):
                found.append(_Run(self._tree, budget, shared | exchange).text())
                exchange = dict.fromkeys(exchange, "")
            exchange[name] = item["content"] or ""
        found.append(_Run(self._tree, budget, shared | exchange, open_end=open_end).text())
        return found


def _collated(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbours of one role made one, but for results of tools; raises TemplateError for contents in parts."""
    found: list[dict[str, Any]] = []
    for item in messages:
        content = item.get("content")
        if isinstance(content, list):
            raise TemplateError("a Go template takes texts only, no parts of contents")
        last = found[-1] if found else None
        joinable = not item.get("tool_calls") and not (last or {}).get("tool_calls")
        if last is not None and last["role"] == item["role"] != "tool" and joinable:
            last["content"] = f"{last['content']}\n\n{content or ''}"
        else:
            found.append(dict(item))
    return found


class _Break(Exception):
    pass


class _Continue(Exception):
    pass


class _Cut(Exception):
    """`.Response` was written, or would have been: the rest is the model's."""


class _Run:
    """One execution."""

    def __init__(self, tree: Tree, budget: Budget, data: dict[str, Any], *, open_end: bool = False) -> None:
        self._tree = tree
        self._budget = budget
        self._data = data
        self._open_end = open_end
        self._parts: list[str] = []
        self._size = 0
        self._depth = 0

    def text(self) -> str:
        """All that is written."""
        try:
            self._nodes(self._tree.root, self._data, [{"$": self._data}])
        except _Cut:
            pass
        except (_Break, _Continue) as error:
            raise TemplateError("the Go template breaks out of a loop where there is none") from error
        return "".join(self._parts)

    def _nodes(self, nodes: list[Node], dot: Any, scopes: list[dict[str, Any]]) -> None:
        scopes = [*scopes, {}]
        for node in nodes:
            self._budget.step()
            if isinstance(node, Text):
                self._write(node.text)
            elif isinstance(node, Show):
                value = self._pipeline(node.pipeline, dot, scopes)
                if not node.pipeline.variables:
                    self._write(written(value))
                    self._maybe_cut(node.pipeline)
            elif isinstance(node, Branch):
                self._branch(node, dot, scopes)
            elif isinstance(node, Jump):
                raise _Break if node.kind == "break" else _Continue
            else:
                self._call(node, dot, scopes)

    def _write(self, text: str) -> None:
        self._size += len(text)
        self._budget.text(self._size)
        self._parts.append(text)

    def _maybe_cut(self, pipeline: Pipeline) -> None:
        if self._open_end and any("Response" in operand.fields for operand in pipeline.operands()):
            raise _Cut

    def _call(self, node: Call, dot: Any, scopes: list[dict[str, Any]]) -> None:
        if node.name not in self._tree.defined:
            raise TemplateError(f"the Go template, line {node.line}: the template {node.name!r} is not defined")
        if self._depth >= _DEPTH:
            raise TemplateError(f"the Go template, line {node.line}: templates call each other {_DEPTH} deep")
        value = None if node.pipeline is None else self._pipeline(node.pipeline, dot, scopes)
        self._depth += 1
        self._nodes(self._tree.defined[node.name], value, [{"$": value}])
        self._depth -= 1

    def _branch(self, node: Branch, dot: Any, scopes: list[dict[str, Any]]) -> None:
        scopes = [*scopes, {}]
        if node.kind == "range":
            self._range(node, dot, scopes)
            return
        value = self._pipeline(node.pipeline, dot, scopes)
        if truth(value):
            self._nodes(node.body, value if node.kind == "with" else dot, scopes)
            return
        self._maybe_cut(node.pipeline)
        self._nodes(node.otherwise, dot, scopes)

    def _range(self, node: Branch, dot: Any, scopes: list[dict[str, Any]]) -> None:
        value = self._pipeline(node.pipeline, dot, scopes, assign=False)
        if isinstance(value, int) and not isinstance(value, bool):
            self._budget.count(value)
            value = list(range(value))
        if isinstance(value, dict):
            pairs = list(value.items())
        elif isinstance(value, list):
            pairs = list(enumerate(value))
        elif not truth(value):
            pairs = []
        else:
            raise self._wrong(node.pipeline, f"range goes over {written(value)[:40]!r}, which is no list and no map")
        for key, item in pairs:
            names = node.pipeline.variables
            values = (key, item)[2 - len(names) :] if names else ()
            for name, part in zip(names, values, strict=True):
                self._assign(name, part, scopes, node.pipeline)
            try:
                self._nodes(node.body, item, scopes)
            except _Continue:
                continue
            except _Break:
                break
        if not pairs:
            self._nodes(node.otherwise, dot, scopes)

    def _assign(self, name: str, value: Any, scopes: list[dict[str, Any]], pipeline: Pipeline) -> None:
        if pipeline.declares:
            scopes[-1][name] = value
            return
        for scope in reversed(scopes):
            if name in scope:
                scope[name] = value
                return
        raise self._wrong(pipeline, f"the variable {name} is not declared")

    def _pipeline(self, pipeline: Pipeline, dot: Any, scopes: list[dict[str, Any]], *, assign: bool = True) -> Any:
        value: Any = None
        for index, command in enumerate(pipeline.commands):
            self._budget.step()
            try:
                value = self._command(command, dot, scopes, [value] if index else [])
            except TemplateError as error:
                raise error if "the Go template, line" in str(error) else self._wrong(pipeline, str(error)) from error
        if assign and pipeline.variables:
            self._assign(pipeline.variables[-1], value, scopes, pipeline)
        return value

    def _command(self, command: tuple[Operand, ...], dot: Any, scopes: list[dict[str, Any]], piped: list[Any]) -> Any:
        first, *rest = command
        if first.kind != "function":
            if piped:
                raise TemplateError("only functions take the value of a pipe")
            return self._operand(first, dot, scopes)
        if first.value in ("and", "or"):
            # Values that don't matter may not even be there: they aren't looked at.
            values: list[Any] = []
            for operand in rest:
                values.append(self._operand(operand, dot, scopes))
                if truth(values[-1]) == (first.value == "or"):
                    return values[-1]
            values += piped
        else:
            values = [*(self._operand(operand, dot, scopes) for operand in rest), *piped]
        try:
            value = FUNCTIONS[first.value](*values)
        except (TypeError, IndexError, ValueError) as error:
            raise TemplateError(f"{first.value} does not take {len(values)} such values") from error
        if isinstance(value, str):
            self._budget.text(len(value))
        return _fields(value, first)

    def _operand(self, operand: Operand, dot: Any, scopes: list[dict[str, Any]]) -> Any:
        if operand.kind == "dot":
            return _fields(dot, operand)
        if operand.kind == "literal":
            return operand.value
        if operand.kind == "pipeline":
            return _fields(self._pipeline(operand.value, dot, scopes), operand)
        if operand.kind == "function":
            return self._command((operand,), dot, scopes, [])
        for scope in reversed(scopes):
            if operand.value in scope:
                return _fields(scope[operand.value], operand)
        raise TemplateError(f"the variable {operand.value} is not declared")

    def _wrong(self, pipeline: Pipeline, message: str) -> TemplateError:
        return TemplateError(f"the Go template, line {pipeline.line}: {message}")


def _fields(value: Any, operand: Operand) -> Any:
    for name in operand.fields:
        value = field(value, name)
    return value
