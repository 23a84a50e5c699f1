"""Attention whose heads need a launch of their own before it, on NVIDIA GPUs: four launches, five with a gate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from arriero.kernels import device
from arriero.kernels import prompt_attention as prompts
from arriero.kernels.attention_part import NotReplayable
from arriero.kernels.cuda import attention as cuda
from arriero.kernels.cuda import heads as of_heads
from arriero.kernels.cuda import wide_attention as wide
from arriero.kernels.cuda.product import Norm, Operand
from arriero.kernels.cuda.source import argument
from arriero.kernels.matrix import Matrix, few
from arriero.kernels.rms_norm import rms_norm


@dataclass(eq=False, slots=True)
class PreparedAttention:
    """Norm, products, norms of heads, rotation by halves, append, causal attention, gate, product; where there are any.

    The rows of `qkv`, one matrix after another, are those of heads in `form`.
    """

    qkv: Sequence[Matrix]
    out: Matrix
    shape: cuda.Shape
    form: of_heads.Form
    query_norm: Norm
    key_norm: Norm
    before: Norm | None = None
    after: Norm | None = None
    _operands: list[Operand | None] = field(default_factory=list)

    def fits(self, dtype: mx.Dtype, lengths: Sequence[int], angles: mx.array) -> bool:
        """Whether this is computed here, for activations and caches of `dtype`; else plain operations do it."""
        gpu = device.cuda()
        norms = [self.query_norm, self.key_norm]
        return (
            gpu is not None
            and gpu.in_place
            and dtype == mx.bfloat16
            and (self._few(lengths, angles) or prompts.takes(self.shape, self.form, dtype, [], angles, norms, {}))
        )

    def _few(self, lengths: Sequence[int], angles: mx.array) -> bool:
        """Whether these are few tokens, whose attention is a kernel of ours."""
        known = of_heads.takes(self.shape, self.form, angles.shape[1], self.query_norm, self.key_norm)
        return known and (cuda.takes(self.shape, lengths, [], None, []) or wide.takes(self.shape, lengths))

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
            raise RuntimeError("attention with prepared heads needs an NVIDIA GPU")
        shape, (*first, last) = self.shape, self._matrices
        made = [few(gpu, x, *pair, norm=self.before) for pair in zip(self.qkv, first, strict=True)]
        parts = [part for part in made if part is not None]
        if len(parts) < len(made):
            normed = x if self.before is None else rms_norm(x, *self.before)
            parts = [matrix(normed) for matrix in self.qkv]
        rows = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)
        where: dict[str, Any] = {"lengths": lengths, "positions": positions, "bases": bases, "memo": memo}
        if not self._few(lengths, angles):
            if cuda.REPLAYED in memo:
                raise NotReplayable("attention of plain operations has its positions in its shapes")
            norms: dict[str, Any] = {"query_norm": self.query_norm, "key_norm": self.key_norm}
            y, filled = prompts.attend(shape, self.form, rows, angles, buffers, **norms, **where)
        else:
            turns, half = _on_device(angles, memo), angles.shape[1]
            ready = of_heads.prepare(shape, self.form, rows, turns, half, self.query_norm, self.key_norm)
            if cuda.takes(shape, lengths, buffers, None, []):
                y, filled = cuda.attend(gpu, shape, ready, None, buffers, query_norm=None, key_norm=None, **where)
            else:
                y, filled = wide.attend(gpu, shape, ready, buffers, **where)
        if self.form.gated:
            y = of_heads.gate(shape, rows, y)
        behind = few(gpu, y, self.out, last)
        y = self.out(y) if behind is None else behind
        return y if self.after is None else rms_norm(y, *self.after), filled

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
