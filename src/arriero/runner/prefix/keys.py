"""What a stored prefix is matched by: one number per position, which no other input can have.

A token is its id. Positions of an image repeat one placeholder id, so they carry the image's identity instead, hashed
anew for each, with bit 31 set, which no token id has. Where a draft's cache needs to know the next token (slot s
depends on token s + 1), a key is a pair: matching k keys then vouches for k + 1 tokens, and a draft's slots below k are
right too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Keys = np.ndarray
"""uint64 `[n]`."""

IMAGE_BIT = np.uint64(1 << 31)
UNKNOWN = np.uint64((1 << 32) - 1)
"""Stands for a token that nobody has read: it matches no prompt."""


@dataclass(frozen=True, slots=True)
class Media:
    """An image in a prompt: the positions `[start, end)` of its placeholders, and what identifies it."""

    start: int
    end: int
    identity: str
    """A hash of the bytes and of everything that preprocessing made of them (sizes, grid)."""


def row_keys(tokens: np.ndarray | Sequence[int], media: Sequence[Media] = (), lookahead: int = 0) -> Keys:
    """The keys of a row: one per token, or, with a look-ahead of 1, one per pair of neighbours (one fewer)."""
    single = np.asarray(tokens, np.uint64)
    if media:
        single = single.copy()
    for item in media:
        single[item.start : item.end] = _folds(item.identity, item.end - item.start)
    if lookahead == 0:
        return single
    if lookahead != 1:
        raise ValueError(f"a draft looks 0 or 1 tokens ahead; got {lookahead}")
    return paired(single & UNKNOWN)


def paired(single: Keys) -> Keys:
    """The keys of pairs of neighbours, one fewer than there are of single positions."""
    pairs: Keys = (single[:-1] << np.uint64(32)) | single[1:]
    return pairs


def second(key: int) -> int:
    """What the second position of a pair is identified by."""
    return key & int(UNKNOWN)


def common(first: Keys, second: Keys) -> int:
    """How many keys at the start are the same."""
    n = min(len(first), len(second))
    different = np.flatnonzero(first[:n] != second[:n])
    return int(different[0]) if len(different) else n


def _folds(identity: str, count: int) -> Keys:
    """For each position of an image a number of 64 bits, of which pairs keep the lower 32."""
    stream = hashlib.shake_128(identity.encode()).digest(8 * count)
    return np.frombuffer(stream, "<u8").astype(np.uint64) | IMAGE_BIT
