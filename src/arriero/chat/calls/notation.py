"""How arguments are written: as JSON, as Gemma's objects, or each as an element of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from arriero import grammar
from arriero.chat.calls.rules import Rules, literal, regex
from arriero.chat.calls.schema import (
    Schema,
    Schemas,
    any_string,
    constants,
    properties,
    string_expression,
    unenforceable,
)

_KEY = regex("[A-Za-z_][A-Za-z0-9_-]{0,63}")
_BARE_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,127}")
_MOST = 64
"""Parameters of a tool that declares none."""


class Notation(Protocol):
    """One way to write the arguments of a call."""

    def arguments(self, rules: Rules, schema: Schema) -> str:
        """What arguments of a schema are, as a part of a rule; InvalidRequest for a keyword that can't be kept."""
        ...

    def anything(self, rules: Rules) -> str:
        """The same for arguments that may be any."""
        ...


@dataclass(frozen=True, slots=True)
class JsonNotation:
    """`{"town": "Brno", "days": 2}`."""

    def arguments(self, rules: Rules, schema: Schema) -> str:
        grammar.check("json_schema", rules.json(dict(schema)).removeprefix("%json "))
        return rules.json(schema)

    def anything(self, rules: Rules) -> str:
        return rules.json({"type": "object"})


@dataclass(frozen=True, slots=True)
class GemmaNotation:
    """`{days:2,town:<|"|>Brno<|"|>}`, in the order of names."""

    quote: str

    def arguments(self, rules: Rules, schema: Schema) -> str:
        writer = _GemmaWriter(rules, self.quote, Schemas(schema))
        return writer.top(schema)

    def anything(self, rules: Rules) -> str:
        return self.arguments(rules, {"type": "object"})


class _GemmaWriter:
    def __init__(self, rules: Rules, quote: str, schemas: Schemas) -> None:
        self._rules = rules
        self._quote = quote
        self._schemas = schemas
        self._free = ""
        self._known: dict[str, str] = {}

    def top(self, schema: Schema) -> str:
        alternatives = self._schemas.alternatives(schema)
        if any(one.get("type") != "object" or constants(one) is not None for one in alternatives):
            raise unenforceable("type")
        return _either([self._object(one) for one in alternatives])

    def _value(self, schema: Any) -> str:
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str):
            return self._either(schema)
        if reference not in self._known:
            # Before its body, which may refer to it.
            name = self._known[reference] = self._rules.reserve("known")
            self._rules.fill(name, self._either(schema))
        return self._known[reference]

    def _either(self, schema: Any) -> str:
        if self._schemas.of(schema) == {}:
            return self._anything()
        return _either([self._one(one) for one in self._schemas.alternatives(schema)])

    def _one(self, schema: Schema) -> str:
        values = constants(schema)
        if values is not None:
            return _either([self._constant(value) for value in values])
        kind = schema["type"]
        if kind == "string":
            return self._string(string_expression(schema))
        if kind == "array":
            return self._list(schema)
        return self._object(schema) if kind == "object" else self._rules.json(self._schemas.json(schema))

    def _constant(self, value: Any) -> str:
        """A value that a schema names."""
        if isinstance(value, str):
            return self._rules.written(self._quoted(value), [self._quote])
        if isinstance(value, dict | list):
            raise unenforceable("const")
        return literal(json.dumps(value))

    def _quoted(self, text: str) -> str:
        if self._quote in text:
            raise unenforceable("enum")
        return f"{self._quote}{text}{self._quote}"

    def _string(self, expression: str) -> str:
        opening = self._rules.written(self._quote, [self._quote])
        return f"({opening} {self._rules.text_before(expression, self._quote)})"

    def _list(self, schema: Schema) -> str:
        item = self._value(schema["items"]) if "items" in schema else self._anything()
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        some = f'{item} ("," {item}){{{max(low - 1, 0)},{"" if high is None else max(high - 1, 0)}}}'
        if high == 0:
            return '"[]"'
        return f'("[" {some} "]")' if low else f'("[]" | "[" {some} "]")'

    def _object(self, schema: Schema) -> str:
        named = sorted(properties(schema), key=lambda one: one[0].lower())
        others = schema.get("additionalProperties", True)
        if not named and others is not False:
            inner = self._anything() if others is True else self._value(others)
            pair = f'{self._rules.add_terminal(_KEY)} ":" {inner}'
            return f'("{{}}" | "{{" {pair} ("," {pair})* "}}")'
        pairs = [(f"{self._key(name)} {self._value(inner)}", needed) for name, inner, needed in named]
        return f'("{{" {listed(self._rules, pairs, ",")} "}}")'

    def _key(self, name: str) -> str:
        text = name if _BARE_KEY.fullmatch(name) else self._quoted(name)
        return self._rules.written(f"{text}:", [self._quote])

    def _anything(self) -> str:
        if not self._free:
            self._free = self._rules.reserve("free")
            kinds = [self._one({"type": kind}) for kind in ("string", "number", "boolean", "null", "array", "object")]
            self._rules.fill(self._free, " | ".join(kinds))
        return self._free


@dataclass(frozen=True, slots=True)
class ElementNotation:
    """Each argument between tags, texts as they are and everything else as JSON."""

    before: str
    """What stands before a name."""
    behind: str
    """What stands between a name and its value."""
    margin: str
    """What stands between a value and its closing tag."""
    closing: str
    after: str
    """What stands behind the closing tag."""
    tags: tuple[str, ...] = ()
    """Those in what stands around, which may be tokens."""
    says_kind: bool = False
    """Whether `behind` has a place for the kind of a value, which is true for texts and false for JSON."""

    def arguments(self, rules: Rules, schema: Schema) -> str:
        schemas = Schemas(schema)
        (whole,) = schemas.alternatives(schema)[:1]
        if whole.get("type") != "object" or len(schemas.alternatives(schema)) > 1 or constants(whole) is not None:
            raise unenforceable("type")
        named = list(properties(whole))
        if not named and whole.get("additionalProperties", True) is not False:
            if whole.get("additionalProperties", True) is not True:
                raise unenforceable("additionalProperties")
            return self.anything(rules)
        found = [(self._element(rules, schemas, name, inner), needed) for name, inner, needed in named]
        return listed(rules, found, "")

    def anything(self, rules: Rules) -> str:
        head = f"{literal(self.before)} {rules.add_terminal(_KEY)} {self._written(rules, self._behind(text=True))}"
        return f"({head} {self._text(rules, regex('(?s:.*)'))}){{0,{_MOST}}}"

    def _element(self, rules: Rules, schemas: Schemas, name: str, schema: Any) -> str:
        if re.search(r'[<>\n"]', name) or name != name.strip() or not name:
            raise unenforceable(f"properties.{name[:40]}")
        texts, others = self._values(rules, schemas, schema)
        ways = []
        for text, values in ((True, texts), (False, others)):
            if values:
                head = f"{self.before}{name}{self._behind(text=text)}"
                ways.append(f"{self._written(rules, head)} {_either(values)}")
        return _either(ways)

    def _values(self, rules: Rules, schemas: Schemas, schema: Any) -> tuple[list[str], list[str]]:
        """What a parameter may be, with its closing tag: as text, and as JSON."""
        texts: list[str] = []
        others: list[str] = []
        close = self._written(rules, f"{self.margin}{self.closing}{self.after}")
        alternatives = [{}] if schemas.of(schema) == {} else schemas.alternatives(schema)
        strings = [one for one in alternatives if one.get("type") == "string" and constants(one) is None]
        if not all(alternatives) or (strings and any(map(any_string, strings))):
            # Any text will do, and what else it may be is told from the text.
            bounded = [one for one in alternatives if set(one) - {"type"} and one not in strings]
            if bounded:
                raise unenforceable("anyOf")
            return [self._text(rules, regex("(?s:.*)"))], []
        for one in alternatives:
            values = constants(one)
            if values is not None:
                texts += [self._constant(rules, value) for value in values if isinstance(value, str)]
                named = [value for value in values if not isinstance(value, str)]
                if named:
                    others.append(f"{rules.json({'enum': named})} {close}")
            elif one in strings:
                if len(alternatives) > len(strings) + sum(other == {"type": "null"} for other in alternatives):
                    raise unenforceable("anyOf")
                texts.append(self._text(rules, string_expression(one)))
            else:
                others.append(f"{rules.json(schemas.json(one))} {close}")
        return texts, others

    def _constant(self, rules: Rules, value: str) -> str:
        if self.closing in value:
            raise unenforceable("enum")
        return self._written(rules, f"{value}{self.margin}{self.closing}{self.after}")

    def _text(self, rules: Rules, expression: str) -> str:
        """A text, which does not hold its closing tag, and that."""
        after = f" {literal(self.after)}" if self.after else ""
        if rules.is_token(self.closing):
            margin = f"{literal(self.margin)} " if self.margin else ""
            return f"({rules.add_terminal(expression)} {margin}{rules.written(self.closing, [self.closing])}{after})"
        inner = f"({expression}) & ~{regex(f'(?s:.*){re.escape(self.closing)}(?s:.*)')}"
        return f"({rules.text_before(inner, f'{self.margin}{self.closing}')}{after})"

    def _behind(self, *, text: bool) -> str:
        return self.behind.format(str(text).lower()) if self.says_kind else self.behind

    def _written(self, rules: Rules, text: str) -> str:
        return rules.written(text, self.tags)


def listed(rules: Rules, items: Sequence[tuple[str, bool]], comma: str) -> str:
    """Items in their order with a comma between them; those that aren't needed may be left out."""
    if not items:
        return '""'
    # From the last: what may follow when something stands before, and when nothing does.
    behind, first = rules.add("end", ""), rules.add("end", "")
    for item, needed in reversed(items):
        name = rules.add("item", item)
        begun = f"{literal(comma)} {name} {behind}" if comma else f"{name} {behind}"
        begins = f"{name} {behind}"
        first = rules.add("first", begins if needed else f"{begins} | {first}")
        behind = rules.add("more", begun if needed else f"{begun} | {behind}")
    return first


def _either(ways: Sequence[str]) -> str:
    return ways[0] if len(ways) == 1 else f"({' | '.join(ways)})"
