"""The tree of a Go template."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from arriero.chat.go.functions import FUNCTIONS
from arriero.chat.go.tokens import Action, Word, string_of, tokens
from arriero.errors import TemplateError

_DEPTH = 100
"""Blocks inside blocks."""
_WORDS_OF_BLOCKS = ("if", "range", "with", "else", "end", "define", "block", "template", "break", "continue")


@dataclass(frozen=True, slots=True)
class Operand:
    """A value and the fields that are looked up in it."""

    kind: Literal["dot", "variable", "literal", "pipeline", "function"]
    value: Any = None
    fields: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Commands, each with its operands; the value of one is the last argument of the next."""

    commands: tuple[tuple[Operand, ...], ...]
    variables: tuple[str, ...] = ()
    """Names that get the value; for `range` also the key."""
    declares: bool = False
    line: int = 0

    def operands(self) -> Iterator[Operand]:
        """All operands, those of inner pipelines too."""
        for command in self.commands:
            for operand in command:
                yield operand
                if operand.kind == "pipeline":
                    yield from operand.value.operands()


@dataclass(slots=True)
class Text:
    text: str


@dataclass(slots=True)
class Show:
    """The value of a pipeline, written out unless it is given to a variable."""

    pipeline: Pipeline


@dataclass(slots=True)
class Branch:
    """`if`, `with` or `range`."""

    kind: Literal["if", "with", "range"]
    pipeline: Pipeline
    body: list[Node] = field(default_factory=list)
    otherwise: list[Node] = field(default_factory=list)


@dataclass(slots=True)
class Jump:
    kind: Literal["break", "continue"]


@dataclass(slots=True)
class Call:
    """Another template, by its name."""

    name: str
    pipeline: Pipeline | None
    line: int


Node = Text | Show | Branch | Jump | Call


class Tree:
    """The main template and those that it defines."""

    def __init__(self, source: str) -> None:
        """Raises TemplateError with the line for what is none of the language or uses an unknown function."""
        self.defined: dict[str, list[Node]] = {}
        self._tokens = tokens(source)
        self._line = 1
        self.root, closing = self._nodes(0)
        if closing is not None:
            raise self._wrong(f"{{{{ {closing[0].text} }}}} stands outside of a block")

    def fields(self) -> frozenset[str]:
        """First names of all fields that are read, in the main template and those it defines."""
        waiting = [self.root, *self.defined.values()]
        found: set[str] = set()
        while waiting:
            for node in waiting.pop():
                if isinstance(node, Branch):
                    waiting += [node.body, node.otherwise]
                pipeline = None if isinstance(node, Text | Jump) else node.pipeline
                if pipeline is not None:
                    found.update(name for operand in pipeline.operands() for name in operand.fields)
        return frozenset(found)

    def _wrong(self, message: str) -> TemplateError:
        return TemplateError(f"the Go template cannot be parsed, line {self._line}: {message}")

    def _nodes(self, depth: int) -> tuple[list[Node], tuple[Word, ...] | None]:
        """Nodes up to `end`, `else` or the end of the text, and the words of that action."""
        if depth > _DEPTH:
            raise self._wrong(f"blocks nest more than {_DEPTH} deep")
        found: list[Node] = []
        for token in self._tokens:
            if isinstance(token, str):
                found.append(Text(token))
                continue
            self._line = token.line
            first = token.words[0].text if token.words and token.words[0].kind == "name" else ""
            if first in ("end", "else"):
                return found, token.words
            node = self._node(first, token, depth)
            if node is not None:
                found.append(node)
        return found, None

    def _node(self, first: str, action: Action, depth: int) -> Node | None:
        words = action.words[1:]
        if first in ("if", "with", "range"):
            return self._branch(first, words, depth)  # type: ignore[arg-type]
        if first in ("break", "continue"):
            return Jump(first)  # type: ignore[arg-type]
        if first == "template":
            return self._call(words)
        if first in ("define", "block"):
            call = self._call(words)
            body, closing = self._nodes(depth + 1)
            if closing is None or closing[0].text != "end":
                raise self._wrong(f"{{{{ {first} }}}} has no end")
            self.defined[call.name] = body
            return call if first == "block" else None
        if not action.words:
            raise self._wrong("an action is empty")
        return Show(self._pipeline(action.words))

    def _branch(self, kind: Literal["if", "with", "range"], words: tuple[Word, ...], depth: int) -> Branch:
        line = self._line
        branch = Branch(kind, self._pipeline(words))
        branch.body, closing = self._nodes(depth + 1)
        if closing is not None and closing[0].text == "else":
            rest = closing[1:]
            if rest and rest[0].text in ("if", "with"):
                branch.otherwise = [self._branch(rest[0].text, rest[1:], depth + 1)]  # type: ignore[arg-type]
                return branch
            if rest:
                raise self._wrong("{{ else }} goes with if, with, or nothing")
            branch.otherwise, closing = self._nodes(depth + 1)
        if closing is None or closing[0].text != "end" or len(closing) > 1:
            self._line = line
            raise self._wrong(f"{{{{ {kind} }}}} has no end")
        return branch

    def _call(self, words: tuple[Word, ...]) -> Call:
        if not words or words[0].kind != "string":
            raise self._wrong("a template's name is missing")
        rest = words[1:]
        return Call(string_of(words[0], self._line), self._pipeline(rest) if rest else None, self._line)

    def _pipeline(self, words: tuple[Word, ...]) -> Pipeline:
        variables, declares = self._variables(words)
        if variables:
            words = words[2 * len(variables) :]
        if not words:
            raise self._wrong("a value is missing")
        commands: list[tuple[Operand, ...]] = []
        rest = list(words)
        while True:
            command, rest = self._command(rest)
            commands.append(command)
            if not rest:
                return Pipeline(tuple(commands), variables, declares, self._line)
            if rest[0].text != "|":
                raise self._wrong(f"{rest[0].text!r} is out of place")
            rest = rest[1:]

    def _variables(self, words: tuple[Word, ...]) -> tuple[tuple[str, ...], bool]:
        """The variables before `:=` or `=`."""
        texts = [word.text for word in words[:4]]
        if len(words) > 1 and words[0].kind == "variable" and texts[1] in (":=", "="):
            return (texts[0],), texts[1] == ":="
        if (
            len(words) > 3
            and words[0].kind == words[2].kind == "variable"
            and texts[1] == ","
            and texts[3] in (":=", "=")
        ):
            return (texts[0], texts[2]), texts[3] == ":="
        return (), False

    def _command(self, words: list[Word]) -> tuple[tuple[Operand, ...], list[Word]]:
        operands: list[Operand] = []
        while words and words[0].text not in ("|", ")"):
            operand, words = self._operand(words)
            while words and words[0].kind == "field" and not words[0].spaced:
                operand = Operand(operand.kind, operand.value, (*operand.fields, words[0].text[1:]))
                words = words[1:]
            operands.append(operand)
        if not operands:
            raise self._wrong("a value is missing")
        if len(operands) > 1 and operands[0].kind != "function":
            raise self._wrong("only functions take arguments")
        return tuple(operands), words

    def _operand(self, words: list[Word]) -> tuple[Operand, list[Word]]:
        word, rest = words[0], words[1:]
        if word.kind == "field":
            return Operand("dot", None, (word.text[1:],)), rest
        if word.kind == "variable":
            return Operand("variable", word.text), rest
        if word.kind == "string":
            return Operand("literal", string_of(word, self._line)), rest
        if word.kind == "number":
            return Operand("literal", json.loads(word.text.lstrip("+"))), rest
        if word.text == ".":
            return Operand("dot"), rest
        if word.text == "(":
            return self._inner(rest)
        if word.text in ("true", "false", "nil"):
            return Operand("literal", {"true": True, "false": False, "nil": None}[word.text]), rest
        if word.kind == "name" and word.text not in _WORDS_OF_BLOCKS:
            if word.text not in FUNCTIONS:
                raise self._wrong(f"the function {word.text} is unknown; known are {', '.join(sorted(FUNCTIONS))}")
            return Operand("function", word.text), rest
        raise self._wrong(f"{word.text!r} is out of place")

    def _inner(self, words: list[Word]) -> tuple[Operand, list[Word]]:
        depth = 1
        for index, word in enumerate(words):
            depth += (word.text == "(" and word.kind == "sign") - (word.text == ")" and word.kind == "sign")
            if depth == 0:
                return Operand("pipeline", self._pipeline(tuple(words[:index]))), words[index + 1 :]
        raise self._wrong("a parenthesis is not closed")
