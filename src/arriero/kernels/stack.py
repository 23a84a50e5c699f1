"""Layers in a row: one operation on the CPU, two launches a layer on NVIDIA GPUs, three with several rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import mlx.core as mx

from arriero.kernels import device
from arriero.kernels.attention_part import AttentionPart
from arriero.kernels.cuda import layer as cuda
from arriero.kernels.cuda.gathering import wanted
from arriero.kernels.cuda.gpu import Gpu
from arriero.kernels.cuda.layer import Chain
from arriero.kernels.cuda.product import fits, multiply
from arriero.kernels.gated_part import GatedPart


@dataclass(eq=False, slots=True)
class Stack:
    """The two halves of each of some layers, one layer behind the other."""

    layers: Sequence[tuple[AttentionPart, GatedPart]]
    _handles: dict[mx.Dtype, Any] = field(default_factory=dict)
    _chains: list[Chain] | None = None
    _chained_for: dict[int, list[Chain]] = field(default_factory=dict)

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

    def on_cuda(self, x: mx.array) -> Gpu | None:
        """The NVIDIA GPU, where its kernels run these layers in few launches for the rows x."""
        gpu = device.cuda()
        if gpu is None or not gpu.in_place or x.dtype != mx.bfloat16:
            return None
        return gpu if self._chained(gpu, x.shape[0]) else None

    def few_launches(
        self,
        gpu: Gpu,
        x: mx.array,
        angles: Sequence[mx.array | None],
        buffers: Sequence[Sequence[mx.array]],
        *,
        lengths: Sequence[int],
        positions: Sequence[int],
        bases: Sequence[Sequence[int]],
        memo: dict[Any, Any],
    ) -> Iterator[tuple[mx.array, Sequence[mx.array]]]:
        """After each layer what is behind it and its filled buffers; `on_cuda` has given the GPU.

        The arguments are those of `AttentionPart`, with an entry for each layer where they differ by layer.
        """
        qkv: mx.array | None = None
        chains = self._chained(gpu, x.shape[0])
        for (part, _), chain, turns, held, begin in zip(self.layers, chains, angles, buffers, bases, strict=True):
            if qkv is None:
                matrices = part.few()
                assert matrices is not None
                qkv = multiply(gpu, x, matrices[0], norm=part.before).y
            y, filled = part.attend_on_cuda(
                gpu, qkv, turns, held, lengths=lengths, positions=positions, bases=begin, memo=memo
            )
            made = cuda.multiply(gpu, x, y, chain)
            x, qkv = made.h, made.qkv
            yield x, filled

    def _chained(self, gpu: Gpu, rows: int) -> list[Chain]:
        """A chain for each layer where all take so many rows, else none."""
        if rows not in self._chained_for:
            chains, first = self._cuda_chains(), self.layers[0][0].few()
            if rows > 1 and not all(cuda.streams(gpu, chain, rows) for chain in chains):
                # The matrix behind down is a launch of its own: what x of the widest takes of shared memory leaves the
                # others little level-1 cache for their scales (H200, 8 rows: 91.5 µs a layer, not 94).
                chains = [chain.alone() for chain in chains]
            taken = (
                wanted()
                and len(chains) == len(self.layers)
                and first is not None
                and all(fits(chain.qkv, gpu, rows) for chain in self._cuda_chains()[:-1])
                and fits(first[0], gpu, rows)
                and all(cuda.fits(gpu, chain, rows) for chain in chains)
            )
            self._chained_for[rows] = chains if taken else []
        return self._chained_for[rows]

    def _cuda_chains(self) -> list[Chain]:
        """A chain for each layer; fewer where a layer is not made of packed matrices without norms behind them."""
        if self._chains is None:
            self._chains = []
            behind = [attention for attention, _ in self.layers[1:]]
            for (attention, gated), following in zip_longest(self.layers, behind):
                out, network = attention.few(), gated.few()
                after = None if following is None else following.few()
                if out is None or network is None or (following is not None and after is None):
                    break
                gate_up, down = network
                chain = Chain(gate_up, down, gated.activation, gated.before, out[1])
                if following is not None and after is not None:
                    chain = replace(chain, qkv=after[0], qkv_norm=following.before)
                self._chains.append(chain)
        return self._chains

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
