"""The pre-norm block that most decoders stack."""

from __future__ import annotations

from typing import Protocol, Self

import mlx.core as mx

from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Batch, Cache
from arriero.model.layers.attention import GroupedAttention
from arriero.model.layers.mlp import GatedMLP
from arriero.model.layers.norm import RMSNorm


class FeedForward(Protocol):
    """`[T, hidden]` to `[T, hidden]`, each token by itself."""

    def __call__(self, x: mx.array) -> mx.array: ...


class PreNormBlock:
    """`x += attention(norm(x)); x += feed_forward(norm(x))`."""

    def __init__(
        self, attention: GroupedAttention, feed_forward: FeedForward, before: RMSNorm, between: RMSNorm
    ) -> None:
        self.attention = attention
        self.feed_forward = feed_forward
        self.before = before
        self.between = between
        attention.surround(before)
        self.gated = feed_forward.part(between) if isinstance(feed_forward, GatedMLP) else None

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        prefix: str,
        dtype: mx.Dtype,
        attention: GroupedAttention,
        feed_forward: FeedForward,
        *,
        eps: float,
    ) -> Self:
        """`input_layernorm` and `post_attention_layernorm` under `prefix`, around the parts given."""
        width = attention.config.hidden
        before, between = (
            RMSNorm.load(checkpoint, f"{prefix}.{name}", dtype, eps=eps, width=width)
            for name in ("input_layernorm", "post_attention_layernorm")
        )
        return cls(attention, feed_forward, before, between)

    def new_cache(self) -> Cache:
        """The attention's memory."""
        return self.attention.new_cache()

    def __call__(self, x: mx.array, batch: Batch, slot: int) -> mx.array:
        branch = self.attention(x, batch, slot)
        if self.gated is not None:
            return self.gated(x, branch)
        x, normed = self.between.of_sum(x, branch)
        return x + self.feed_forward(normed)
