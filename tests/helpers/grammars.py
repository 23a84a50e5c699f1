"""A vocabulary of bytes and longer pieces, and thirty schemas that replies of a random model must fit."""

from __future__ import annotations

import json
from typing import Any

from arriero.runner.engine import Engine, Limits
from arriero.runner.messages import Grammar, SamplingOptions, Submit, Thoughts, Vocabulary
from arriero.runner.sampling import Sampler
from arriero.runner.speculation.controller import EveryRound
from arriero.runner.speculation.speculator import Speculator
from tests.helpers.tiny_model import TinyModel

PIECES = [
    b'{"',
    b'":',
    b'",',
    b'"}',
    b"true",
    b"false",
    b"null",
    b"ab",
    b"abc",
    b": ",
    b", ",
    b"\n\n",
    b"10",
    b'"a"',
    b"[]",
]
THINK, UNTHINK, STOP, CALL = 256 + len(PIECES), 257 + len(PIECES), 258 + len(PIECES), 259 + len(PIECES)
TOKENS = [*(bytes((byte,)) for byte in range(256)), *PIECES, b"<think>", b"</think>", b"<|end|>", b"<|call|>", b""]
VOCABULARY = Vocabulary(tokens=TOKENS, special=[THINK, UNTHINK, STOP, CALL])
THOUGHTS = Thoughts(opening=b"<think>", closing="</think>", opened=False)
HOT = SamplingOptions(temperature=1.5, top_k=0, top_p=1.0, seed=0)


def _object(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


_WORD = {"type": "string", "maxLength": 6}
_SMALL = {"type": "integer", "minimum": 0, "maximum": 10}
_LIST = {"type": "array", "items": _SMALL, "minItems": 1, "maxItems": 3}

SCHEMAS: list[dict[str, Any]] = [
    _object(score=_SMALL, grade={"enum": ["a", "b", "abc"]}),
    {"type": "boolean"},
    {"type": "null"},
    {"enum": ["yes", "no", 1, None, {"a": [1]}]},
    {"const": {"a": "b"}},
    _WORD,
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "string", "pattern": "^[a-c]{2,5}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    _SMALL,
    {"type": "integer", "exclusiveMinimum": -20, "maximum": 300},
    {"type": "integer", "minimum": 0, "maximum": 99, "multipleOf": 5},
    {"type": "number", "minimum": 0.5, "maximum": 1.25},
    _LIST,
    {"type": "array", "prefixItems": [_SMALL, _WORD], "items": False, "minItems": 2},
    {"type": "array", "items": _object(a=_SMALL), "maxItems": 2},
    _object(a=_object(b=_object(c=_LIST))),
    _object(required=["a"], a=_SMALL, b=_WORD, c={"type": "null"}),
    {"type": "object", "additionalProperties": _SMALL, "maxProperties": 2, "propertyOrdering": []},
    {"type": "object", "patternProperties": {"^x[0-9]$": _SMALL}, "additionalProperties": False, "maxProperties": 2},
    {"anyOf": [_object(a=_SMALL), _object(b=_WORD), {"type": "null"}]},
    {"oneOf": [_object(kind={"const": "cat"}, lives=_SMALL), _object(kind={"const": "dog"}, name=_WORD)]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 7}]},
    {"$defs": {"leaf": _object(v=_SMALL)}, "type": "array", "items": {"$ref": "#/$defs/leaf"}, "maxItems": 2},
    _object(a={"type": ["integer", "null"], "minimum": 0, "maximum": 9}),
    _object(**{'quote"d': _SMALL, "naïve ü": {"type": "boolean"}}),
    _object(
        a={"type": "array", "items": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}, "maxItems": 2}
    ),
    _object(host={"type": "string", "format": "ipv6"}, who={"type": "string", "enum": ["ä", "€", "😀"]}),
]


def engine(ahead: bool = False, rows: int = 8, seed: int = 1, speculate: bool = False) -> Engine:
    """A small random model that was told the vocabulary; `speculate` copies from the rows' own texts."""
    model, sampler = TinyModel("f", context=4096, seed=seed, vocab=len(TOKENS)), Sampler(len(TOKENS), 4096)
    # Whatever it costs: a busy machine must not decide what is tested.
    speculator = Speculator(model, sampler, depths=EveryRound()) if speculate else None
    limits = Limits(context_length=4096, max_rows=rows)
    made = Engine(model, sampler, limits, ahead, speculator=speculator)
    made.learn(VOCABULARY)
    return made


def schema(value: Any, thoughts: Thoughts | None = None) -> Grammar:
    """A grammar of a schema."""
    return Grammar(kind="json_schema", text=json.dumps(value), thoughts=thoughts)


def ask(row: str, grammar: Grammar | None, seed: int = 0, count: int = 3000, **changes: Any) -> Submit:
    """A request for a hot reply."""
    options = {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "seed": seed, **changes}
    return Submit(
        id=row,
        tokens=[1 + seed % 250, 2, 3],
        max_tokens=count,
        stop_tokens=[STOP, CALL],
        sampling=SamplingOptions(**options),
        grammar=grammar,
    )


def answer(tokens: list[int]) -> str:
    """What a reply says behind its thoughts; UnicodeDecodeError where that is no text."""
    said = b"".join(TOKENS[token] for token in tokens)
    return said.rpartition(b"</think>")[2].decode()
