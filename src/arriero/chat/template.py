"""Chat templates: Jinja in a sandbox with limits, with the names that templates written for transformers use."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Protocol, TypeVar

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.utils import Namespace

from arriero.chat.sandbox import Budget, LimitedEnvironment, LimitReached
from arriero.errors import TemplateError

T = TypeVar("T")

MAX_SOURCE = 1 << 18
"""Characters of a template: what compiles in seconds, and several times the largest one that is in use."""
MAX_COMPLAINT = 2000
"""Characters of what a template says when it refuses a conversation."""

_GO = re.compile(
    r"\{\{-?\s*(?:\.[A-Z]|\$|(?:if|else|end|range|with|define|template|block|break|continue|json|and|or|not|eq|ne|lt|gt"
    r"|le|ge|len|index|slice|printf|currentDate|toTypeScriptType)\b(?:\s+[.$(\"!]|\s*-?\}\}))"
)


def is_go_template(text: str) -> bool:
    """Whether a TEMPLATE is Go's text/template language, not Jinja."""
    return "{%" not in text and "{#" not in text and _GO.search(text) is not None


class TemplateStopped(TemplateError):
    """A template that reached its limit of time or size; another reading of the conversation won't help."""


class ChatTemplate(Protocol):
    """A compiled template, in whichever language."""

    @property
    def source(self) -> str:
        """Its text."""
        ...

    @property
    def variables(self) -> frozenset[str]:
        """Names that it reads from its arguments."""
        ...

    def render(self, arguments: Mapping[str, Any]) -> str:
        """The prompt; raises TemplateError."""
        ...


class Template:
    """One compiled Jinja template."""

    def __init__(self, source: str, *, seconds: float = 10.0) -> None:
        """Compile; `seconds` is the time that compiling, and each rendering, may take.

        Raises TemplateError with the line for a template that can't be parsed.
        """
        if len(source) > MAX_SOURCE:
            raise TemplateError(f"the chat template has {len(source)} characters; at most {MAX_SOURCE} are accepted")
        self.source = source
        self._seconds = seconds
        self._environment = _environment()
        with Budget(seconds):
            self._template = self._guard(lambda: self._environment.from_string(source))
            self.variables = frozenset(self._guard(lambda: find_undeclared_variables(self._environment.parse(source))))
        """Names that the template reads from its arguments."""

    def render(self, arguments: Mapping[str, Any]) -> str:
        """The prompt; raises TemplateError with the line, also when a limit of time or size is reached."""
        with Budget(self._seconds):
            return self._guard(lambda: self._environment.joined(self._template, arguments))

    def _guard(self, action: Callable[[], T]) -> T:
        try:
            return action()
        except LimitReached as error:
            raise TemplateStopped(f"the chat template was stopped: {error}") from error
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"the chat template cannot be parsed, line {error.lineno}: {error.message}") from error
        except RecursionError as error:
            raise TemplateStopped("the chat template was stopped: it nests too deeply") from error
        except Exception as error:  # a template can raise anything that its expressions can
            line = _line(error)
            where = f", line {line}" if line else ""
            said = str(error)[:MAX_COMPLAINT] or type(error).__name__
            raise TemplateError(f"the chat template failed{where}: {said}") from error


def _line(error: BaseException) -> int | None:
    """The template's line where an error came from."""
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks replies for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as a class attribute

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A scope of its own, as the call block of transformers has: names set inside don't leak.
        return nodes.Scope(body).set_lineno(line)


class _TemplateNamespace(Namespace):
    """A namespace that holds no underscored names, so that nothing can be smuggled past the sandbox."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        values = dict(*args, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace can't hold the underscored name {name!r}")


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(str(message))


def _strftime_now(layout: str) -> str:
    if len(layout) > 1000:
        raise LimitReached(f"a date layout of {len(layout)} characters")
    return datetime.now().strftime(layout)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> LimitedEnvironment:
    return LimitedEnvironment(
        extensions=[_GenerationTag, loopcontrols],
        filters={"tojson": _tojson},
        names={
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "namespace": _TemplateNamespace,
            "dict": _make_dict,
        },
    )
