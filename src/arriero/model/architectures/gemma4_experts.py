"""The mixture of experts of Gemma 4, which runs beside the dense network in every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import mlx.core as mx

from arriero.model.checkpoint import Checkpoint
from arriero.model.layers.config import Fields
from arriero.model.layers.experts import Experts, Router
from arriero.model.layers.linear import Linear, expect_shape
from arriero.model.layers.mlp import Activation
from arriero.model.layers.norm import RMSNorm
from arriero.model.layers.shape import DecoderShape


@dataclass(frozen=True)
class ExpertsConfig:
    """How many experts there are, how many of them a token gets, and their width."""

    experts: int
    top_k: int
    intermediate: int

    @classmethod
    def read(cls, fields: Fields) -> Self | None:
        """None where `enable_moe_block` is off, whatever the other fields say."""
        if not fields.flag("enable_moe_block", False):
            fields.get("num_experts")
            return None
        experts = fields.integer("num_experts")
        top_k = fields.integer("top_k_experts")
        if top_k > experts:
            raise fields.wrong("top_k_experts", f"at most the number of experts ({experts})", top_k)
        return cls(experts, top_k, fields.integer("moe_intermediate_size"))


class ScaledRouter:
    """Chooses experts by a normed and scaled hidden state; each expert's weight has a factor of its own."""

    def __init__(self, norm: RMSNorm, router: Router, factors: mx.array) -> None:
        self.norm = norm
        self.router = router
        self.factors = factors
        """Float32 `[experts]`."""

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, config: ExpertsConfig, shape: DecoderShape
    ) -> Self:
        """`scale`, `per_expert_scale` and `proj` under `prefix`."""
        scale = checkpoint.tensor(f"{prefix}.scale")
        expect_shape(f"{prefix}.scale", tuple(scale.shape), (shape.hidden,))
        factors = checkpoint.tensor(f"{prefix}.per_expert_scale")
        expect_shape(f"{prefix}.per_expert_scale", tuple(factors.shape), (config.experts,))
        gate = Linear.load(checkpoint, f"{prefix}.proj", dtype, bias=False, shape=(config.experts, shape.hidden))
        # Both factors of the input as one gain in float32, which is not rounded.
        gain = scale.astype(mx.float32) * shape.hidden**-0.5
        return cls(RMSNorm(gain, shape.eps), Router(gate, config.top_k, normalise=True), factors.astype(mx.float32))

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """x `[T, hidden]` to experts, uint32 `[T, k]`, and their weights, float32 `[T, k]`."""
        chosen, weights = self.router(self.norm(x))
        return chosen, weights * self.factors[chosen]


class ParallelExperts:
    """`norm(dense) + norm(experts(norm(x)))`, the router looking at x itself."""

    def __init__(self, router: ScaledRouter, experts: Experts, norms: Sequence[RMSNorm]) -> None:
        self.router = router
        self.experts = experts
        self.after_dense, self.before_experts, self.after_experts = norms

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        prefix: str,
        dtype: mx.Dtype,
        config: ExpertsConfig,
        shape: DecoderShape,
        activation: Activation,
    ) -> Self:
        """`router`, `experts` and three norms under the layer's `prefix`."""
        norms = ["post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"]
        return cls(
            ScaledRouter.load(checkpoint, f"{prefix}.router", dtype, config, shape),
            Experts.load(
                checkpoint,
                prefix,
                dtype,
                experts=config.experts,
                hidden=shape.hidden,
                intermediate=config.intermediate,
                activation=activation,
            ),
            [RMSNorm.load(checkpoint, f"{prefix}.{n}", dtype, eps=shape.eps, width=shape.hidden) for n in norms],
        )

    def __call__(self, x: mx.array, dense: mx.array) -> mx.array:
        """The residual x `[T, hidden]` and the dense network's output, to the sum of both branches."""
        chosen, weights = self.router(x)
        sparse = self.experts(self.before_experts(x), chosen, weights)
        return self.after_dense(dense) + self.after_experts(sparse)
