"""The pre-norm block that most decoders stack."""

from __future__ import annotations

from typing import Protocol, Self, runtime_checkable

import mlx.core as mx

from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Batch, Cache
from arriero.model.layers.attention import GroupedAttention
from arriero.model.layers.delta_net import GatedDeltaNet
from arriero.model.layers.gated_attention import GatedAttention
from arriero.model.layers.mla import LatentAttention
from arriero.model.layers.mlp import GatedMLP
from arriero.model.layers.norm import RMSNorm
from arriero.model.layers.stack import Halves


class Mixer(Protocol):
    """What lets tokens see others, with a memory of its own: attention or a recurrence."""

    def new_cache(self) -> Cache: ...

    def __call__(self, x: mx.array, batch: Batch, slot: int) -> mx.array: ...


class FeedForward(Protocol):
    """`[T, hidden]` to `[T, hidden]`, each token by itself."""

    def __call__(self, x: mx.array) -> mx.array: ...


@runtime_checkable
class SparseFeedForward(FeedForward, Protocol):
    """A mixture of experts, which takes in the sum and the norm before it."""

    def after(self, x: mx.array, branch: mx.array, norm: RMSNorm) -> mx.array: ...


class PreNormBlock:
    """`x += mixer(norm(x)); x += feed_forward(norm(x))`.

    Attention, delta nets, gated networks and mixtures take in the norm before them; some are one operation then.
    """

    def __init__(self, mixer: Mixer, feed_forward: FeedForward, before: RMSNorm, between: RMSNorm) -> None:
        self.mixer = mixer
        self.feed_forward = feed_forward
        self.before: RMSNorm | None = before
        self.between = between
        if isinstance(mixer, GroupedAttention | GatedAttention | GatedDeltaNet | LatentAttention):
            mixer.surround(before)
            self.before = None
        self.gated = feed_forward.part(between) if isinstance(feed_forward, GatedMLP) else None
        self.sparse = feed_forward if isinstance(feed_forward, SparseFeedForward) else None

    @classmethod
    def around(
        cls,
        checkpoint: Checkpoint,
        prefix: str,
        dtype: mx.Dtype,
        mixer: Mixer,
        feed_forward: FeedForward,
        *,
        eps: float,
        width: int,
        centred: bool = False,
        baked: bool | None = None,
    ) -> Self:
        """The parts given, with `input_layernorm` and `post_attention_layernorm` under `prefix`.

        `centred` and `baked` as `RMSNorm.load` takes them.
        """
        before, between = (
            RMSNorm.load(checkpoint, f"{prefix}.{name}", dtype, eps=eps, width=width, centred=centred, baked=baked)
            for name in ("input_layernorm", "post_attention_layernorm")
        )
        return cls(mixer, feed_forward, before, between)

    @property
    def halves(self) -> Halves | None:
        """Attention and the gated network, where the layer is these two."""
        return (self.mixer, self.gated) if isinstance(self.mixer, GroupedAttention) and self.gated else None

    def new_cache(self) -> Cache:
        """The mixer's memory."""
        return self.mixer.new_cache()

    def __call__(self, x: mx.array, batch: Batch, slot: int) -> mx.array:
        branch = self.mixer(x if self.before is None else self.before(x), batch, slot)
        if self.gated is not None:
            return self.gated(x, branch)
        if self.sparse is not None:
            return self.sparse.after(x, branch, self.between)
        x, normed = self.between.of_sum(x, branch)
        return x + self.feed_forward(normed)
