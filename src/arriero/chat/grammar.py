"""What a request's `format` means: the grammar that a reply must fit, and what may stand before or in its place."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from arriero import grammar
from arriero.chat.parsers.events import Parser
from arriero.chat.parsers.harmony import HarmonyParser
from arriero.chat.parsers.reply import ReplyParser
from arriero.errors import InvalidRequest
from arriero.runner.messages import Grammar, Thoughts, Trigger

Spell = Callable[[str], int | None]
"""The token that a tag is in a vocabulary, None where it is text."""

_ANY_OBJECT = '{"type": "object"}'


def _no_tokens(_tag: str) -> None:
    """No tag is a token."""


class Format(msgspec.Struct, frozen=True):
    """A form that replies must have; checked."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str
    alone: bool = False
    """Nothing may stand in its place, not even a call."""
    whole: bool = False
    """It holds for the thoughts, too."""


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


def grammar_for(
    wanted: Format | None, parser: Parser, spell: Spell = _no_tokens, triggers: Sequence[Trigger] = ()
) -> Grammar:
    """The grammar of a reply that `parser` is going to read: behind its thoughts, unless it calls a tool on offer.

    `spell` says which tags are tokens, `triggers` what holds in its calls. None wanted: it is free but for those.
    """
    thoughts: Thoughts | None = None
    calls: list[bytes] = []
    calls_stop = False
    if isinstance(parser, HarmonyParser):
        if wanted is not None and not wanted.whole and not parser.answering:
            thoughts = Thoughts(opening=b"", closing=_final(spell), opened=True)
        calls_stop = parser.has_tools
    elif isinstance(parser, ReplyParser):
        alone = wanted is not None and wanted.alone
        calls = [] if alone else [opening.encode() for opening in parser.call_openings]
        found = parser.thoughts
        if found is not None:
            closing = marked(found.closing, spell)
            thoughts = Thoughts(opening=found.opening.encode(), closing=closing, opened=found.opened)
    return Grammar(
        kind="free" if wanted is None else wanted.kind,
        text="" if wanted is None else wanted.text,
        thoughts=thoughts,
        calls=calls,
        calls_stop=calls_stop,
        triggers=list(triggers),
    )


def marked(tag: str, spell: Spell) -> str:
    """A regular expression, as `Trigger` has them, for a tag: its token where it is one, else its text."""
    return re.escape(tag) if spell(tag) is None else rf"\xff{re.escape(tag)}"


def _final(spell: Spell) -> str:
    """Where the answer of a reply with channels begins."""
    channel, constrain, message = (marked(f"<|{tag}|>", spell) for tag in ("channel", "constrain", "message"))
    return rf"{channel}final[^<]{{0,40}}(?:{constrain}[^<]{{0,40}})?{message}"


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
