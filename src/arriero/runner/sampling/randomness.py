"""Random numbers that depend on a row's seed and on how often it has drawn, and on nothing else."""

from __future__ import annotations

import os
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

MASK = 2**64 - 1


def mix(seed: int, counter: int) -> int:
    """The `counter`-th output of SplitMix64 (Steele et al. 2014) seeded with `seed`: 64 bits."""
    z = (seed + 0x9E3779B97F4A7C15 * (counter + 1)) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def fresh_seed() -> int:
    """A seed that nobody chose."""
    return int.from_bytes(os.urandom(8), "little")


class Stream:
    """The draws of one row: every call of `next` is one draw."""

    __slots__ = ("counter", "seed")

    def __init__(self, seed: int) -> None:
        self.seed = seed & MASK
        self.counter = 0

    def next(self) -> int:
        """64 random bits."""
        bits = self.peek(0)
        self.counter += 1
        return bits

    def peek(self, ahead: int) -> int:
        """What `next` will give after `ahead` more calls."""
        return mix(self.seed, self.counter + ahead)


def keys(seeds: Sequence[int]) -> mx.array:
    """One MLX key per 64-bit number, `[n, 2]` uint32: row i equals `mx.random.key(seeds[i])`."""
    numbers = np.array(seeds, np.uint64)
    return mx.array(np.stack([numbers >> np.uint64(32), numbers & np.uint64(2**32 - 1)], axis=-1).astype(np.uint32))


def gumbel(row_keys: mx.array, width: int) -> mx.array:
    """Gumbel noise `[n, width]` float32, each row of its own key."""
    if row_keys.shape[0] == 1:
        return mx.random.gumbel((1, width), key=row_keys[0])
    noise: mx.array = mx.vmap(lambda key: mx.random.gumbel((width,), key=key))(row_keys)
    return noise


def uniform(row_keys: mx.array, width: int) -> mx.array:
    """Uniform numbers in [0, 1) `[n, width]` float32, each row of its own key."""
    if row_keys.shape[0] == 1:
        return mx.random.uniform(shape=(1, width), key=row_keys[0])
    numbers: mx.array = mx.vmap(lambda key: mx.random.uniform(shape=(width,), key=key))(row_keys)
    return numbers
