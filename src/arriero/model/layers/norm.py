"""Normalisation layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import mlx.core as mx

from arriero.kernels.layer_norm import layer_norm
from arriero.kernels.rms_norm import add_rms_norm, rms_norm
from arriero.model.checkpoint import Checkpoint
from arriero.model.layers.linear import expect_shape


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """`x / rms(x) · gain` over the last axis; the result has x's dtype."""

    gain: mx.array
    eps: float

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        prefix: str,
        dtype: mx.Dtype,
        *,
        eps: float,
        width: int,
        centred: bool = False,
        baked: bool | None = None,
    ) -> Self:
        """`prefix.weight` `[width]`, in the activations' dtype.

        `centred` weights are stored around 0: the gain is `1 + w`, held in float32 because 16 bits would round it. A
        file that is `baked` holds the sum already (None: GGUF files are, others are not).
        """
        weight = checkpoint.tensor(f"{prefix}.weight")
        expect_shape(f"{prefix}.weight", tuple(weight.shape), (width,))
        if not centred:
            return cls(weight.astype(dtype), eps)
        gain = weight.astype(mx.float32)
        if baked is None:
            baked = checkpoint.dialect == "gguf"
        return cls(gain if baked else gain + 1, eps)

    @property
    def pair(self) -> tuple[mx.array, float]:
        """The gain and the epsilon."""
        return self.gain, self.eps

    def __call__(self, x: mx.array) -> mx.array:
        return rms_norm(x, self.gain, self.eps)

    def of_sum(self, x: mx.array, branch: mx.array) -> tuple[mx.array, mx.array]:
        """`x + branch`, and that sum normalised."""
        return add_rms_norm(x, branch, self.gain, self.eps)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """`(x − mean) / sqrt(variance + ε) · gain` over the last axis, in float32, without a bias; the result has x's
    dtype.
    """

    gain: mx.array
    eps: float

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, *, eps: float, width: int) -> Self:
        """`prefix.weight` `[width]`, in the activations' dtype."""
        weight = checkpoint.tensor(f"{prefix}.weight")
        expect_shape(f"{prefix}.weight", tuple(weight.shape), (width,))
        return cls(weight.astype(dtype), eps)

    def __call__(self, x: mx.array) -> mx.array:
        return layer_norm(x, self.gain, self.eps)
