"""Layers in a row that run as one operation where the kernels have one."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from arriero.kernels.gated_part import GatedPart
from arriero.kernels.stack import Stack
from arriero.model.contract import Batch
from arriero.model.layers.attention import GroupedAttention, spans

Halves = tuple[GroupedAttention, GatedPart]
"""What a plain layer does: attention with the norms around it, then the gated network."""


class LayerStack:
    """The layers of the slots from `first` on."""

    def __init__(self, layers: Sequence[Halves], first: int) -> None:
        self._attentions = [attention for attention, _ in layers]
        self._first = first
        self._stack = Stack([(attention.part, gated) for attention, gated in layers])
        self._mutual = any(attention.config.mutual for attention in self._attentions)

    def takes(self, x: mx.array, batch: Batch) -> bool:
        """Whether this forward can run as one operation."""
        if self._mutual and batch.features:
            return False
        return all(a.dtype == x.dtype for a in self._attentions) and self._stack.takes(x.dtype)

    def __call__(self, x: mx.array, batch: Batch) -> mx.array:
        """`[T, hidden]` to `[T, hidden]`; the spans' caches are told what will be written into their buffers."""
        lengths, positions = spans(batch)
        slots = [batch.caches(self._first + index) for index in range(len(self._attentions))]
        buffers: list[mx.array] = []
        bases: list[int] = []
        after: dict[int, mx.array] = {}
        for caches in slots:
            for cache, length in zip(caches, lengths, strict=True):
                keys, values, base = cache.reserve_in_place(length)
                buffers += (keys, values)
                bases.append(base)
                written = cache.written
                if written is not None:
                    after[id(written)] = written
        y = self._stack(
            x,
            [None if a.rope is None else a.rope.angles(batch) for a in self._attentions],
            buffers,
            lengths=lengths,
            positions=positions,
            bases=bases,
            after=list(after.values()),
        )
        for caches in slots:
            for cache, length in zip(caches, lengths, strict=True):
                cache.commit_in_place(length, y)
        return y
