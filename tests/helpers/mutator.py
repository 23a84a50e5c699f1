"""Damage, drawn from a seed: to bytes anywhere, and to JSON documents where it reaches deepest."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

EXTREMES = (0, 1, 7, 127, 255, 1 << 15, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 48, 1 << 62, 1 << 63, (1 << 64) - 1)
NUMBERS = (
    -1,
    -(1 << 31),
    -(1 << 63),
    1 << 31,
    1 << 50,
    (1 << 53) + 1,
    (1 << 63) - 1,
    1 << 63,
    1 << 64,
    10**40,
    0.5,
    1e308,
)
WORDS = (
    "",
    "\0",
    "é\u202e",
    "..",
    "../../x",
    "/etc/passwd",
    "sha256:" + "0" * 64,
    "sha256:" + "g" * 64,
    "F32",
    "F4",
    "x" * 3000,
    "x" * 3000 + ".safetensors",
    "a\0.safetensors",
    "model-a.safetensors",
)


@dataclass(frozen=True)
class Raw:
    """A piece of JSON text as it is."""

    text: str


BOMBS = (
    Raw("[" * 2000 + "]" * 2000),
    Raw("[" * 60_000),
    Raw('{"a":' * 30_000),
    Raw("9" * 5000),
    Raw("1e9999"),
    Raw("-0"),
    Raw("NaN"),
    Raw("Infinity"),
    Raw('"\\ud800"'),
    Raw('"\\ud800.safetensors"'),
    Raw('{"a":1,"a":2}'),
    Raw("[" + "0," * 4000 + "0]"),
    Raw("tru"),
)


class Pairs(list[tuple[str, Any]]):
    """An object whose names may come twice."""


def bytes_damaged(data: bytes, draw: random.Random) -> bytes:
    """One to four pieces of damage."""
    raw = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        draw.choice(BYTE_DAMAGE)(raw, draw)
    return bytes(raw)


def document_damaged(document: Any, draw: random.Random) -> str:
    """JSON text of a document of which one to three nodes are something else, doubled or gone."""
    tree = _pairs(document)
    for _ in range(draw.randint(1, 3)):
        tree = _node_damaged(tree, draw)
    return _text(tree)


def _flip(raw: bytearray, draw: random.Random) -> None:
    for _ in range(draw.randint(1, 8)):
        if raw:
            raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)


def _cut(raw: bytearray, draw: random.Random) -> None:
    del raw[draw.randint(0, len(raw)) :]


def _cut_out(raw: bytearray, draw: random.Random) -> None:
    at = draw.randint(0, len(raw))
    del raw[at : at + draw.choice((1, 2, 4, 8, 64))]


def _put_in(raw: bytearray, draw: random.Random) -> None:
    at = draw.randint(0, len(raw))
    raw[at:at] = draw.randbytes(draw.choice((1, 2, 4, 8, 64)))


def _double(raw: bytearray, draw: random.Random) -> None:
    at, length = draw.randint(0, len(raw)), draw.choice((4, 16, 64, 256))
    raw[at:at] = raw[at : at + length]


def _lengthen(raw: bytearray, draw: random.Random) -> None:
    """A length, a count or an offset becomes another one: often a huge one."""
    code, size = draw.choice((("<I", 4), ("<Q", 8)))
    if len(raw) >= size:
        at = draw.randint(0, len(raw) - size)
        raw[at : at + size] = struct.pack(code, draw.choice(EXTREMES) % (1 << 8 * size))


def _nudge(raw: bytearray, draw: random.Random) -> None:
    if len(raw) >= 4:
        at = draw.randint(0, len(raw) - 4)
        raw[at : at + 4] = struct.pack("<I", draw.randint(0, 45))


BYTE_DAMAGE: tuple[Callable[[bytearray, random.Random], None], ...] = (
    _flip, _flip, _cut, _cut_out, _put_in, _double, _lengthen, _lengthen, _nudge,
)  # fmt: skip


def _pairs(value: Any) -> Any:
    if isinstance(value, dict):
        return Pairs((name, _pairs(inner)) for name, inner in value.items())
    return [_pairs(inner) for inner in value] if isinstance(value, list) else value


def _node_damaged(node: Any, draw: random.Random) -> Any:
    """Go down a random way and change what is there."""
    if isinstance(node, Pairs) and node and draw.random() < 0.85:
        at = draw.randrange(len(node))
        name, inner = node[at]
        chance = draw.random()
        if chance < 0.06:
            return Pairs([*node[:at], *node[at + 1 :]])
        if chance < 0.12:
            return Pairs([*node, (name, inner)])
        if chance < 0.18:
            return Pairs([*node[:at], (draw.choice(WORDS), inner), *node[at + 1 :]])
        return Pairs([*node[:at], (name, _node_damaged(inner, draw)), *node[at + 1 :]])
    if isinstance(node, list) and not isinstance(node, Pairs) and node and draw.random() < 0.85:
        at = draw.randrange(len(node))
        if draw.random() < 0.2:
            return [*node[:at], *node[at + draw.randint(0, 1) :], *node[:at]]
        return [*node[:at], _node_damaged(node[at], draw), *node[at + 1 :]]
    if isinstance(node, int) and draw.random() < 0.4:
        return draw.choice((node + 1, node - 1, -node, node * 2, node // 2, str(node), float(node), [node]))
    return draw.choice(
        (draw.choice(NUMBERS), draw.choice(WORDS), draw.choice(BOMBS), None, True, [], Pairs(), {"a": []})
    )


def _text(value: Any) -> str:
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, Pairs):
        return "{" + ",".join(f"{json.dumps(name)}:{_text(inner)}" for name, inner in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_text, value)) + "]"
    return json.dumps(value)
