"""The hash that turns the last tokens into row numbers of a table of n-grams.

It is done on the host: it needs 64-bit integers, and the table may be in a file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import mlx.core as mx
import numpy as np

from arriero.errors import CheckpointError
from arriero.model.layers.config import Fields

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
LARGEST_BASE = 1 << 40
"""Primes are searched by division: far above any table, and still quick."""


@dataclass(frozen=True, slots=True)
class NGramsConfig:
    """The tables of n-grams up to `size` tokens, `heads` rows for each length, in the layers `layers`."""

    layers: tuple[int, ...]
    size: int
    heads: int
    width: int
    """Of all rows of a token together."""
    base: int
    """The least number of rows of one head."""
    divisor: int
    shards: int
    taps: int
    seed: int
    vocab: int
    boundary: int
    """The token that ends the context."""

    @classmethod
    def read(cls, fields: Fields, *, hidden: int, vocab: int, linear: Sequence[bool], boundary: int | None) -> Self:
        """`linear` says which layers are recurrent; only those may have a table."""
        numbers = fields.get("ple_layer_ids", [])
        if not isinstance(numbers, list) or not all(type(n) is int and 1 <= n <= len(linear) for n in numbers):
            raise fields.wrong("ple_layer_ids", f"a list of layer numbers from 1 to {len(linear)}", numbers)
        layers = tuple(sorted(n - 1 for n in numbers))
        if len(set(layers)) != len(layers):
            raise fields.wrong("ple_layer_ids", "a list without repeats", numbers)
        if not all(linear[layer] for layer in layers):
            raise fields.wrong("ple_layer_ids", "numbers of linear_attention layers", numbers)
        if layers and boundary is None:
            raise CheckpointError(f"{fields.where}: `eos_token_id` is missing, at which n-grams end")
        size, heads = fields.integer("ngram_size", minimum=2), fields.integer("heads_per_ngram")
        width = fields.integer("ple_embed_dim", hidden)
        if width % ((size - 1) * heads):
            raise fields.wrong("ple_embed_dim", f"a multiple of the {(size - 1) * heads} rows of a token", width)
        return cls(
            layers=layers,
            size=size,
            heads=heads,
            width=width,
            base=fields.integer("ngram_vocab_size_base", maximum=LARGEST_BASE),
            divisor=fields.integer("make_ngram_vocab_size_divisible_by"),
            shards=fields.integer("split_ngram_parts"),
            taps=fields.integer("ple_conv_kernel_size", minimum=2),
            seed=fields.integer("seed", 1234, minimum=0),
            vocab=vocab,
            boundary=0 if boundary is None else boundary,
        )

    @property
    def rows_per_token(self) -> int:
        return (self.size - 1) * self.heads

    @property
    def history(self) -> int:
        """Rows that the dilated convolution looks back."""
        return (self.taps - 1) * self.size

    def cache_bytes(self, channels: int, dtype: mx.Dtype) -> int:
        """Bytes that a row's memory of one table takes."""
        return (self.size - 1) * mx.int32.size + self.history * channels * dtype.size


def mix(value: int) -> int:
    """One output of SplitMix64. Source: Steele, Lea and Flood, 2014."""
    value = (value + GOLDEN) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


@dataclass(frozen=True, slots=True)
class NGramHash:
    """From token ids to row numbers: products with `multipliers`, combined by xor, modulo each head's size."""

    multipliers: np.ndarray
    sizes: np.ndarray
    offsets: np.ndarray
    heads: int
    boundary: int

    @classmethod
    def of(cls, config: NGramsConfig, module: int) -> Self:
        """The hash of the table number `module`: sizes are successive primes, each used once over all tables."""
        half = max(1, ((1 << 63) - 1) // config.vocab // 2)
        first = config.seed + 10007 * module
        multipliers = [2 * (mix((first + GOLDEN * (i + 1)) & MASK) % half) + 1 for i in range(config.size)]
        count = config.rows_per_token
        sizes = np.array(_primes(config.base, (module + 1) * count)[module * count :], np.int64)
        offsets = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        return cls(np.array(multipliers, np.int64), sizes, offsets, config.heads, config.boundary)

    @property
    def rows(self) -> int:
        """Rows that can be addressed."""
        return int(self.sizes.sum())

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        """Row numbers int64 `[T, heads]` of the last T of `tokens` `[n − 1 + T]`, shorter n-grams first.

        A predecessor that is the boundary, and all before it, count as the boundary.
        """
        context = len(self.multipliers) - 1
        tokens = tokens.astype(np.int64)
        mixed = tokens[context:] * self.multipliers[0]
        cut = np.zeros(mixed.shape, bool)
        found: list[np.ndarray] = []
        for back in range(1, context + 1):
            before = tokens[context - back : len(tokens) - back]
            cut = cut | (before == self.boundary)
            mixed = mixed ^ (np.where(cut, self.boundary, before) * self.multipliers[back])
            heads = slice((back - 1) * self.heads, back * self.heads)
            found.append(mixed[:, None] % self.sizes[heads] + self.offsets[heads])
        return np.concatenate(found, axis=1)


def _primes(start: int, count: int) -> list[int]:
    """The first `count` primes that are at least `start`."""
    found: list[int] = []
    number = max(2, start)
    while len(found) < count:
        if number == 2 or (number % 2 and all(number % d for d in range(3, math.isqrt(number) + 1, 2))):
            found.append(number)
        number += 1
    return found
