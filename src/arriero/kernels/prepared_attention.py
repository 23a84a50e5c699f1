"""Attention whose queries bring a gate for its output, in five launches on NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from arriero.kernels import device
from arriero.kernels.cuda import attention as cuda
from arriero.kernels.cuda import gated_heads
from arriero.kernels.cuda.product import Norm, Operand, fits, multiply
from arriero.kernels.cuda.source import argument
from arriero.kernels.matrix import Matrix
from arriero.kernels.rms_norm import rms_norm


@dataclass(eq=False, slots=True)
class GatedAttentionPart:
    """Norm, products, norms of heads, rotation by halves, append, causal attention, gate, product.

    The rows of `qkv`, one matrix after another, are of each query head the query and the gate, then those of k and v.
    """

    qkv: Sequence[Matrix]
    out: Matrix
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    query_norm: Norm
    key_norm: Norm
    before: Norm | None = None
    _operands: list[Operand | None] = field(default_factory=list)

    def fits(self, dtype: mx.Dtype, lengths: Sequence[int], angles: mx.array) -> bool:
        """Whether this is computed here, for activations and caches of `dtype`; else plain operations do it."""
        gpu = device.cuda()
        return (
            gpu is not None
            and gpu.in_place
            and dtype == mx.bfloat16
            and gated_heads.takes(self._shape, angles, self.query_norm, self.key_norm)
            and cuda.takes(self._shape, lengths, [], None, [])
        )

    def __call__(
        self,
        x: mx.array,
        angles: mx.array,
        buffers: Sequence[mx.array],
        *,
        lengths: Sequence[int],
        positions: Sequence[int],
        bases: Sequence[int],
        memo: dict[Any, Any],
    ) -> tuple[mx.array, list[mx.array]]:
        """As `AttentionPart`, for what `fits` has accepted."""
        gpu = device.cuda()
        if gpu is None:
            raise RuntimeError("gated attention in few launches needs an NVIDIA GPU")
        shape, (*first, last) = self._shape, self._matrices
        few = [operand for operand in first if fits(operand, gpu, x.shape[0])]
        if len(few) == len(first):
            parts = [multiply(gpu, x, operand, norm=self.before).y for operand in few]
        else:
            normed = x if self.before is None else rms_norm(x, *self.before)
            parts = [matrix(normed) for matrix in self.qkv]
        rows = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)
        turns = _on_device(angles, memo)
        y, filled = cuda.attend(
            gpu,
            shape,
            gated_heads.prepare(shape, rows, turns, angles.shape[1], self.query_norm, self.key_norm),
            None,
            buffers,
            lengths=lengths,
            positions=positions,
            bases=bases,
            query_norm=None,
            key_norm=None,
            memo=memo,
        )
        y = gated_heads.gate(shape, rows, y)
        return multiply(gpu, y, last).y if fits(last, gpu, x.shape[0]) else self.out(y), filled

    @property
    def _shape(self) -> cuda.Shape:
        return cuda.Shape(self.heads, self.kv_heads, self.head_dim, self.scale)

    @property
    def _matrices(self) -> list[Operand | None]:
        if not self._operands:
            self._operands = [matrix.operand() for matrix in (*self.qkv, self.out)]
        return self._operands


def _on_device(angles: mx.array, memo: dict[Any, Any]) -> mx.array:
    """The table of angles in the device's own memory, copied once a forward."""
    key = (cuda.ANGLES, id(angles))
    if key not in memo:
        memo[key] = (angles, argument(angles))
    found: mx.array = memo[key][1]
    return found
