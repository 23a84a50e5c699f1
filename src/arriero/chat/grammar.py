"""What a request's `format` means: the grammar that a reply must fit, and what may stand before or in its place."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import msgspec

from arriero import grammar
from arriero.chat.parsers.events import Parser
from arriero.chat.parsers.harmony import HarmonyParser
from arriero.chat.parsers.reply import ReplyParser
from arriero.errors import InvalidRequest
from arriero.runner.messages import Grammar, Thoughts

_ANY_OBJECT = '{"type": "object"}'
_FINAL = r"<\|channel\|>final[^<]{0,40}(?:<\|constrain\|>[^<]{0,40})?<\|message\|>"
"""Where the answer of a reply with channels begins."""


class Format(msgspec.Struct, frozen=True):
    """A form that replies must have; checked."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str
    alone: bool = False
    """Nothing may stand in its place, not even a call."""


def read_format(value: Any, field: str = "format") -> Format | None:
    """A `format` as the native API has it; None for none.

    `"json"` is any JSON object, an object is a JSON schema. Ours: `{"regex": "…"}` and `{"lark": "…"}`, which no schema
    is. Raises InvalidRequest for anything else, and for a grammar that can't be used, naming the keyword. A large
    schema takes a fraction of a second: not in the event loop.
    """
    if value is None or value == "":
        return None
    if value == "json":
        return Format("json_schema", _ANY_OBJECT)
    if not isinstance(value, dict):
        raise InvalidRequest(f'invalid {field}: {_shown(value)}; expected "json" or a valid JSON Schema object')
    found = Format("json_schema", json.dumps(value, ensure_ascii=False))
    if len(value) == 1:
        for kind in ("regex", "lark"):
            text = value.get(kind)
            if isinstance(text, str):
                found = Format(kind, text)
    try:
        grammar.check(found.kind, found.text)
    except InvalidRequest as error:
        raise InvalidRequest(f"invalid {field}: {error}") from None
    return found


def grammar_for(wanted: Format, parser: Parser) -> Grammar:
    """The grammar of a reply that `parser` is going to read: behind its thoughts, unless it calls a tool on offer."""
    thoughts: Thoughts | None = None
    calls: list[bytes] = []
    calls_stop = False
    if isinstance(parser, HarmonyParser):
        if not parser.answering:
            thoughts = Thoughts(opening=b"", closing=_FINAL, opened=True)
        calls_stop = parser.has_tools
    elif isinstance(parser, ReplyParser):
        calls = [] if wanted.alone else [opening.encode() for opening in parser.call_openings]
        found = parser.thoughts
        if found is not None:
            thoughts = Thoughts(opening=found.opening.encode(), closing=re.escape(found.closing), opened=found.opened)
    return Grammar(kind=wanted.kind, text=wanted.text, thoughts=thoughts, calls=calls, calls_stop=calls_stop)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
