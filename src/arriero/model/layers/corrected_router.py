"""Routers that score experts by sigmoid and choose by the score plus a learned correction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import mlx.core as mx

from arriero.kernels.activation import softcap
from arriero.kernels.cuda.router import Choice
from arriero.kernels.topk import top_k, top_k_values
from arriero.model.checkpoint import Checkpoint
from arriero.model.layers.config import Fields
from arriero.model.layers.linear import Linear, expect_shape

SMALLEST = 1e-20
"""Added to a sum of weights before it divides them, as the reference does."""


@dataclass(frozen=True, slots=True)
class CorrectedRouterConfig:
    """How many experts a token gets, out of which groups, and what their weights are multiplied by."""

    experts: int
    top_k: int
    groups: int
    top_groups: int
    """Of `groups`, those that a token's experts come from."""
    normalise: bool
    scale: float
    cap: float | None = None
    """Soft cap of the gate's logits."""

    @classmethod
    def read(
        cls, fields: Fields, *, scale: float = 1.0, normalise: bool = True, groups: tuple[int, int] = (1, 1)
    ) -> Self:
        """From `n_routed_experts`, `num_experts_per_tok`, `n_group`, `topk_group`, `norm_topk_prob` and
        `routed_scaling_factor`; the arguments are defaults, `groups` those of the two counts of groups. CheckpointError
        names what contradicts.
        """
        renamed = not fields.has("n_routed_experts") and fields.has("num_local_experts")
        experts = fields.integer("num_local_experts" if renamed else "n_routed_experts")
        count = fields.integer("n_group", groups[0])
        if experts % count or (count > 1 and experts // count < 2):
            raise fields.wrong("n_group", f"so that {experts} experts make groups of at least two", count)
        top_groups = fields.integer("topk_group", groups[1], maximum=count)
        chosen = fields.integer("num_experts_per_tok")
        if chosen > top_groups * (experts // count):
            raise fields.wrong("num_experts_per_tok", f"at most {top_groups * (experts // count)} experts", chosen)
        return cls(
            experts=experts,
            top_k=chosen,
            groups=count,
            top_groups=top_groups,
            normalise=fields.flag("norm_topk_prob", normalise),
            scale=fields.number("routed_scaling_factor", scale),
        )


class CorrectedRouter:
    """`top_k` experts by `σ(Wx) + correction`, weighed by `σ(Wx)` alone. All of it in float32.

    With groups, only the groups whose two best experts sum highest take part. Source: DeepSeek-AI, DeepSeek-V3
    Technical Report, 2024.
    """

    def __init__(self, config: CorrectedRouterConfig, gate: Linear, correction: mx.array) -> None:
        self.config = config
        self.gate = gate
        self.correction = correction

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str, config: CorrectedRouterConfig, *, hidden: int) -> Self:
        """`weight` `[experts, hidden]` and `e_score_correction_bias` `[experts]` under `prefix`."""
        name = f"{prefix}.e_score_correction_bias"
        correction = checkpoint.tensor(name)
        expect_shape(name, tuple(correction.shape), (config.experts,))
        gate = Linear.load(checkpoint, prefix, mx.float32, bias=False, shape=(config.experts, hidden))
        return cls(config, gate, correction.astype(mx.float32))

    @property
    def choice(self) -> Choice | None:
        """As the CUDA kernels take it; None for what they don't."""
        c = self.config
        if c.cap is not None:
            return None
        return Choice(c.top_k, c.normalise, c.scale, self.correction, c.groups, c.top_groups)

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """x `[T, hidden]` to experts, uint32 `[T, k]`, and their weights, float32 `[T, k]`."""
        c = self.config
        logits = self.gate(x.astype(mx.float32))
        scores = mx.sigmoid(logits if c.cap is None else softcap(logits, c.cap))
        choice = scores + self.correction
        if c.top_groups < c.groups:
            grouped = choice.reshape(-1, c.groups, c.experts // c.groups)
            best, _ = top_k_values(grouped, 2)
            kept = top_k(best.sum(axis=-1), c.top_groups)
            taking_part = (kept[..., None] == mx.arange(c.groups, dtype=mx.int32)).any(axis=1)
            choice = mx.where(taking_part[..., None], grouped, -mx.inf).reshape(choice.shape)
        chosen = top_k(choice, c.top_k).astype(mx.uint32)
        weights = mx.take_along_axis(scores, chosen, axis=-1)
        if c.normalise:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + SMALLEST)
        return chosen, weights * c.scale
