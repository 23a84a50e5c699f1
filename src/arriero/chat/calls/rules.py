"""The rules of one grammar in Lark's notation, as they are collected."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from arriero import grammar
from arriero.chat.grammar import Spell

_DELICATE = re.compile(r"\\.|[/\n]", re.DOTALL)
_SPELLED = {"/": "\\/", "\n": "\\n", "\\\n": "\\n"}
_WHITE_SPACE = {"whitespace_flexible": True, "whitespace_pattern": grammar.BLANKS}


class Rules:
    """Named rules; knows nothing of models."""

    def __init__(self, spell: Spell) -> None:
        self._spell = spell
        self._bodies: dict[str, str] = {}

    @property
    def text(self) -> str:
        """All of them, one a line."""
        return "\n".join(f"{name}: {body}" for name, body in self._bodies.items())

    def add(self, hint: str, body: str) -> str:
        """A rule under a name of its own."""
        name = self.reserve(hint)
        self._bodies[name] = body
        return name

    def reserve(self, hint: str) -> str:
        """The name of a rule whose body comes later, so that it may speak of itself; it must come."""
        name = f"{hint}_{len(self._bodies)}"
        self._bodies[name] = ""
        return name

    def fill(self, name: str, body: str) -> None:
        """The body of a reserved rule."""
        self._bodies[name] = body

    def written(self, text: str, tags: Sequence[str] = ()) -> str:
        """Text as it is, with those of `tags` in it as tokens where they are ones."""
        if not text:
            return '""'
        known = [tag for tag in tags if tag and self._spell(tag) is not None]
        if not known:
            return literal(text)
        pieces = re.split("(" + "|".join(map(re.escape, sorted(known, key=len, reverse=True))) + ")", text)
        return " ".join(f"<[{self._spell(piece)}]>" if piece in known else literal(piece) for piece in pieces if piece)

    def is_token(self, tag: str) -> bool:
        """Whether a tag is a token."""
        return self._spell(tag) is not None

    def text_before(self, expression: str, closing: str) -> str:
        """The name of a rule for a text that fits a regular expression, and the first `closing` behind it.

        Where that is a token, no text can hold it.
        """
        if self.is_token(closing):
            return self.add("text", f"{self.add_terminal(expression)} <[{self._spell(closing)}]>")
        name = self.reserve("text")
        head = f"{name}[suffix={literal(closing)}]"
        self._bodies = {head if key == name else key: body for key, body in self._bodies.items()}
        self._bodies[head] = expression
        return name

    def add_terminal(self, expression: str) -> str:
        """A terminal of a regular expression."""
        name = f"TEXT_{len(self._bodies)}"
        self._bodies[name] = expression
        return name

    def json(self, schema: Any) -> str:
        """JSON of a schema."""
        if isinstance(schema, dict):
            schema = schema | {"x-guidance": _WHITE_SPACE}
        return f"%json {json.dumps(schema, ensure_ascii=False)}"


def literal(text: str) -> str:
    """A text as Lark quotes it."""
    return json.dumps(text, ensure_ascii=False)


def regex(expression: str) -> str:
    """A regular expression as Lark writes it."""
    # What is escaped already stays so: `\/` is how many schemas write a slash.
    return "/" + _DELICATE.sub(lambda found: _SPELLED.get(found[0], found[0]), expression) + "/"
