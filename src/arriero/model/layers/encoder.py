"""What encoders of text are made of: self-attention over whole texts, without a cache, and layer norms with biases."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import mlx.core as mx

from arriero.kernels.attention import attention
from arriero.kernels.layer_norm import layer_norm
from arriero.model.checkpoint import Checkpoint
from arriero.model.layers.config import Fields
from arriero.model.layers.linear import FusedLinear, Linear, expect_shape

Turn = Callable[[mx.array], mx.array]
"""Rotates queries or keys `[T, heads, D]` by their positions."""


def refuse_causal(fields: Fields) -> None:
    """CheckpointError where a configuration makes an encoder see only what stands before a token."""
    for name in ("is_causal", "is_decoder"):
        if fields.flag(name, False):
            raise fields.wrong(name, "false", True)


def gelu(x: mx.array) -> mx.array:
    """`x · Φ(x)` by erf, in float32; the result has x's dtype. Source: Hendrycks and Gimpel, 2016."""
    wide = x.astype(mx.float32)
    return (0.5 * wide * (1 + mx.erf(wide * math.sqrt(0.5)))).astype(x.dtype)


def gelu_tanh(x: mx.array) -> mx.array:
    """Its tanh form."""
    wide = x.astype(mx.float32)
    return (0.5 * wide * (1 + mx.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))).astype(x.dtype)


@dataclass(frozen=True, slots=True)
class BiasedNorm:
    """`(x − mean) / sqrt(variance + ε) · gain + bias` over the last axis; the result has x's dtype."""

    gain: mx.array
    bias: mx.array
    eps: float

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, *, eps: float, width: int) -> Self:
        """`prefix.weight` and `prefix.bias`, both `[width]`."""

        def vector(name: str) -> mx.array:
            found = checkpoint.tensor(f"{prefix}.{name}")
            expect_shape(f"{prefix}.{name}", tuple(found.shape), (width,))
            return found.astype(dtype)

        return cls(vector("weight"), vector("bias"), eps)

    def __call__(self, x: mx.array) -> mx.array:
        return layer_norm(x, self.gain, self.eps) + self.bias


class WholeAttention:
    """Attention in which every token of a text sees all of it, or `reach` tokens on either side; texts don't see each
    other.
    """

    def __init__(self, q: Linear, k: Linear, v: Linear, out: Linear, *, heads: int, reach: int | None = None) -> None:
        self.qkv = FusedLinear([q, k, v])
        self.out = out
        self.heads = heads
        self.reach = reach

    def __call__(self, x: mx.array, lengths: Sequence[int], memo: dict[Any, Any], turn: Turn | None = None) -> mx.array:
        """x `[T, hidden]` of texts of `lengths`, one behind another."""
        parts = [part.reshape(x.shape[0], self.heads, -1) for part in self.qkv(x)]
        q, k, v = (turn(parts[0]), turn(parts[1]), parts[2]) if turn is not None else parts
        keys, values, at = [], [], 0
        for length in lengths:
            keys.append(k[at : at + length].swapaxes(0, 1)[None])
            values.append(v[at : at + length].swapaxes(0, 1)[None])
            at += length
        if self.reach is not None and max(lengths) > self.reach + 1:
            return self.out(self._near(q, keys, values, lengths, self.reach, memo).reshape(x.shape[0], -1))
        seen = attention(
            q,
            keys,
            values,
            scale=q.shape[-1] ** -0.5,
            lengths=lengths,
            positions=[0] * len(lengths),
            causal=False,
            memo=memo,
        )
        return self.out(seen.reshape(x.shape[0], -1))

    def _near(
        self,
        q: mx.array,
        keys: Sequence[mx.array],
        values: Sequence[mx.array],
        lengths: Sequence[int],
        reach: int,
        memo: dict[Any, Any],
    ) -> mx.array:
        """The same over the tokens in reach."""
        parts, at = [], 0
        for k, v, length in zip(keys, values, lengths, strict=True):
            mask = memo.get(("near", reach, length))
            if mask is None:
                places = mx.arange(length)
                mask = memo["near", reach, length] = mx.abs(places[:, None] - places[None]) <= reach
            heads = q[at : at + length].swapaxes(0, 1)[None]
            seen = mx.fast.scaled_dot_product_attention(heads, k, v, scale=q.shape[-1] ** -0.5, mask=mask)
            parts.append(seen.squeeze(0).swapaxes(0, 1))
            at += length
        return mx.concatenate(parts)
