"""Prefix stores over caches without a model, one letter a layer: `f` keys and values, `r` a recurrence, `-` nothing."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import mlx.core as mx

from arriero.model.contract import RowCaches
from arriero.runner.caches import KVCache, RecurrentCache
from arriero.runner.prefix.keys import Keys, row_keys
from arriero.runner.prefix.store import PrefixStore, Reuse

PLENTY = 1 << 40


def new_caches(layers: str) -> RowCaches:
    """Fresh caches."""
    made = {
        "f": lambda: KVCache(1, 4, 4, mx.float32),
        "r": lambda: RecurrentCache(2, 4, mx.float32, (2, 2)),
        "-": lambda: None,
    }
    return [made[kind]() for kind in layers]


def feed(caches: RowCaches, length: int) -> None:
    """Write so many positions into all of them."""
    for cache in caches:
        if isinstance(cache, KVCache):
            cache.append(mx.zeros((1, 1, length, 4)), mx.zeros((1, 1, length, 4)))
        elif isinstance(cache, RecurrentCache):
            state = (mx.zeros((1, 2, 4)), mx.zeros((1, 2, 2)))
            cache.put([state] * (len(cache.splits(length)) + 1), length)


def store_of(layers: str, budget: int = PLENTY) -> PrefixStore:
    """A store for a model with these layers."""
    return PrefixStore(SimpleNamespace(new_caches=lambda: new_caches(layers)), budget)


def asked(store: PrefixStore, tokens: list[int], boundaries: Sequence[int] = (10, 25)) -> tuple[Reuse, Keys]:
    """A row that has read its prompt but for the last token, and the prompt's keys."""
    keys = row_keys(tokens)
    reuse = store.begin(keys, boundaries)
    feed(reuse.caches, len(tokens) - 1 - reuse.offset)
    return reuse, keys
