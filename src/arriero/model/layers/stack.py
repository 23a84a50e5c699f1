"""Layers in a row that run as one operation where the kernels have one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx

from arriero.kernels.cuda.attention import LONGEST
from arriero.kernels.cuda.gpu import Gpu
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
        self._ropes = [attention.rope for attention in self._attentions]
        self._mutual = any(attention.config.mutual for attention in self._attentions)

    def takes(self, x: mx.array, batch: Batch) -> bool:
        """Whether this forward can run as one operation, or in few launches."""
        if self._mutual and batch.features:
            return False
        if not all(a.dtype == x.dtype for a in self._attentions):
            return False
        return self._stack.takes(x.dtype) or self._on_cuda(x, batch) is not None

    def _on_cuda(self, x: mx.array, batch: Batch) -> Gpu | None:
        """The NVIDIA GPU, where it runs these layers in few launches."""
        lengths, _ = spans(batch)
        if max(lengths) > LONGEST:
            return None
        gpu = self._stack.on_cuda(x)
        if gpu is None:
            return None
        taken = (
            attention.part.takes_on_cuda(
                lengths, keys, None if attention.rope is None else attention.rope.angles(batch)
            )
            for attention, keys in zip(self._attentions, self._buffers(batch, lengths), strict=True)
        )
        return gpu if all(taken) else None

    def _buffers(self, batch: Batch, lengths: Sequence[int]) -> Iterator[list[mx.array]]:
        """The keys' buffers of each layer."""
        for index in range(len(self._attentions)):
            caches = batch.caches(self._first + index)
            yield [cache.reserve(length)[0] for cache, length in zip(caches, lengths, strict=True)]

    def __call__(self, x: mx.array, batch: Batch) -> mx.array:
        """`[T, hidden]` to `[T, hidden]`; the spans' caches are told what will be written into their buffers."""
        lengths, positions = spans(batch)
        gpu = self._on_cuda(x, batch)
        if gpu is not None:
            return self._few_launches(gpu, x, batch, lengths, positions)
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
        angles = {rope: None if rope is None else rope.angles(batch) for rope in set(self._ropes)}
        y = self._stack(
            x,
            [angles[rope] for rope in self._ropes],
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

    def _few_launches(
        self, gpu: Gpu, x: mx.array, batch: Batch, lengths: Sequence[int], positions: Sequence[int]
    ) -> mx.array:
        slots = [batch.caches(self._first + index) for index in range(len(self._attentions))]
        held = [[cache.reserve(length) for cache, length in zip(caches, lengths, strict=True)] for caches in slots]
        done = self._stack.few_launches(
            gpu,
            x,
            [None if a.rope is None else a.rope.angles(batch) for a in self._attentions],
            [[buffer for keys, values, _ in of_slot for buffer in (keys, values)] for of_slot in held],
            lengths=lengths,
            positions=positions,
            bases=[[base for _, _, base in of_slot] for of_slot in held],
            memo=batch.memo,
        )
        for caches, (behind, filled) in zip(slots, done, strict=True):
            for i, (cache, length) in enumerate(zip(caches, lengths, strict=True)):
                cache.commit(filled[2 * i], filled[2 * i + 1], length)
            x = behind
        return x
