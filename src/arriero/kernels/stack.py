"""Layers in a row as one operation on the CPU, which writes into their caches' own memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from arriero.kernels import device
from arriero.kernels.attention_part import AttentionPart
from arriero.kernels.gated_part import GatedPart


@dataclass(eq=False, slots=True)
class Stack:
    """The two halves of each of some layers, one layer behind the other."""

    layers: Sequence[tuple[AttentionPart, GatedPart]]
    _handles: dict[mx.Dtype, Any] = field(default_factory=dict)

    def takes(self, dtype: mx.Dtype) -> bool:
        """Whether it can be called with x and buffers of this type: only on the CPU, once the weights are computed."""
        handle = self._handle(dtype)
        return handle is not None and bool(handle.ready)

    def __call__(
        self,
        x: mx.array,
        angles: Sequence[mx.array | None],
        buffers: Sequence[mx.array],
        *,
        lengths: Sequence[int],
        positions: Sequence[int],
        bases: Sequence[int],
        after: Sequence[mx.array],
    ) -> mx.array:
        """x `[T, hidden]` behind the last layer, with the bits of the halves called one by one.

        `angles` has an entry for each layer, `buffers` keys and values of each span of each layer, `bases` an entry for
        each such pair; the rest is as `AttentionPart` takes it. The buffers are written in place once the result is
        computed, and not before the arrays `after` are: whoever reads them next must depend on it.
        """
        y: mx.array = self._handle(x.dtype)(x, angles, buffers, lengths, positions, bases, after)
        return y

    def _handle(self, dtype: mx.Dtype) -> Any:
        """The extension's version, made once; None where there is none for this device or these formats."""
        native = device.native()
        if native is None:
            return None
        if dtype not in self._handles:
            halves = [(attention.handle(dtype), gated.handle(dtype)) for attention, gated in self.layers]
            whole = all(half is not None for layer in halves for half in layer)
            self._handles[dtype] = native.stack(halves) if whole else None
        return self._handles[dtype]
