"""Routers that score each expert by itself and keep a learned correction out of the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import mlx.core as mx

from arriero.errors import CheckpointError
from arriero.kernels.activation import softcap
from arriero.model.checkpoint import Checkpoint
from arriero.model.layers.linear import Linear, expect_shape


@dataclass(frozen=True, slots=True)
class SigmoidRouter:
    """Chooses the `top_k` experts of the highest `σ(gate(x)) + correction`; the weights are the bare `σ(gate(x))`.

    Source: DeepSeek-AI, DeepSeek-V3, 2024 (balancing without an auxiliary loss).
    """

    gate: Linear
    correction: mx.array
    """float32 `[experts]`."""
    top_k: int
    normalise: bool
    """Whether the chosen weights are made to sum to one."""
    scale: float = 1.0
    """What the weights are multiplied by, last."""
    cap: float | None = None
    """Soft cap of the gate's logits."""

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        prefix: str,
        dtype: mx.Dtype,
        *,
        hidden: int,
        experts: int,
        top_k: int,
        normalise: bool,
        scale: float = 1.0,
        cap: float | None = None,
    ) -> Self:
        """Under `prefix` (e.g. `model.layers.1.mlp`): `gate` or `gate.proj`, and `e_score_correction_bias` of `gate` or
        `experts`. CheckpointError names what is missing.
        """
        gate = next((n for n in (f"{prefix}.gate", f"{prefix}.gate.proj") if f"{n}.weight" in checkpoint), None)
        names = [f"{prefix}.{owner}.e_score_correction_bias" for owner in ("gate", "experts")]
        name = next((n for n in names if n in checkpoint), None)
        if gate is None:
            raise CheckpointError(f"the checkpoint has no {prefix}.gate.weight or {prefix}.gate.proj.weight")
        if name is None:
            raise CheckpointError(f"the checkpoint has no {' or '.join(names)}")
        correction = checkpoint.tensor(name).astype(mx.float32)
        expect_shape(name, tuple(correction.shape), (experts,))
        linear = Linear.load(checkpoint, gate, dtype, bias=False, shape=(experts, hidden))
        return cls(linear, correction, top_k, normalise, scale, cap)

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """x `[T, hidden]` to experts, uint32 `[T, k]`, and their weights, float32 `[T, k]`."""
        logits = self.gate(x).astype(mx.float32)
        if self.cap is not None:
            logits = softcap(logits, self.cap)
        scores = mx.sigmoid(logits)
        chosen = mx.argpartition(-(scores + self.correction), kth=self.top_k - 1, axis=-1)[..., : self.top_k]
        weights = mx.take_along_axis(scores, chosen, axis=-1)
        if self.normalise:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        return chosen.astype(mx.uint32), weights if self.scale == 1 else weights * self.scale
