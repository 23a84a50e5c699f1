"""The feed-forward parts of Nemotron-H: networks without a gate, and a mixture of such experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import mlx.core as mx

from arriero.kernels import device
from arriero.model.checkpoint import Checkpoint
from arriero.model.layers.config import Fields
from arriero.model.layers.corrected_router import CorrectedRouter, CorrectedRouterConfig
from arriero.model.layers.expert_rows import through_experts
from arriero.model.layers.experts import expert_product, load_bank
from arriero.model.layers.linear import Linear, expect_shape
from arriero.model.weight import Weight

MLX_NAMES = {"up_proj": "fc1", "down_proj": "fc2"}
"""What MLX's tools call the stacked matrices of the experts."""


@device.fused
def relu_squared(x: mx.array) -> mx.array:
    """`max(x, 0)²`. Source: So et al., Primer, 2021."""
    positive = mx.maximum(x.astype(mx.float32), 0)
    return (positive * positive).astype(x.dtype)


class PlainMLP:
    """`down(max(up(x), 0)²)`."""

    def __init__(self, up: Linear, down: Linear) -> None:
        self.up = up
        self.down = down

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, *, hidden: int, intermediate: int, bias: bool
    ) -> Self:
        """`up_proj` and `down_proj` under `prefix`."""
        return cls(
            Linear.load(checkpoint, f"{prefix}.up_proj", dtype, bias=bias, shape=(intermediate, hidden)),
            Linear.load(checkpoint, f"{prefix}.down_proj", dtype, bias=bias, shape=(hidden, intermediate)),
        )

    def __call__(self, x: mx.array) -> mx.array:
        return self.down(relu_squared(self.up(x)))


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The router, the widths of the experts and of the one that every token takes, and where the experts work."""

    router: CorrectedRouterConfig
    hidden: int
    intermediate: int
    shared: int
    """Width of the expert that every token takes."""
    latent: int | None
    """Width that the hidden state is projected to before the experts and back from behind them."""
    bias: bool

    @classmethod
    def read(cls, fields: Fields, *, hidden: int, bias: bool) -> Self:
        """CheckpointError names a field that is missing or not honoured."""
        if fields.integer("n_shared_experts", 1, minimum=0) != 1:
            raise fields.wrong("n_shared_experts", "1", fields.get("n_shared_experts"))
        return cls(
            router=CorrectedRouterConfig.read(fields),
            hidden=hidden,
            intermediate=fields.integer("moe_intermediate_size"),
            shared=fields.integer("moe_shared_expert_intermediate_size"),
            latent=fields.optional_integer("moe_latent_size"),
            bias=bias,
        )


class PlainExperts:
    """A bank of experts without gates: `Σ weight · down(max(up(x), 0)²)`."""

    def __init__(self, up: Weight, down: Weight) -> None:
        self.up = up
        self.down = down

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, *, experts: int, width: int, intermediate: int
    ) -> Self:
        """Under `prefix`: `experts.N.up_proj.weight` one by one or stacked as `load_bank` knows, or MLX's names."""

        def bank(name: str, shape: tuple[int, int, int]) -> Weight:
            by_mlx = f"{prefix}.switch_mlp.{MLX_NAMES[name]}.weight"
            if by_mlx not in checkpoint:
                return load_bank(checkpoint, prefix, name, dtype, shape)
            found = checkpoint.weight(by_mlx).astype(dtype)
            expect_shape(by_mlx, found.shape, shape)
            return found

        return cls(bank("up_proj", (experts, intermediate, width)), bank("down_proj", (experts, width, intermediate)))

    def __call__(self, x: mx.array, chosen: mx.array, weights: mx.array) -> mx.array:
        """x `[T, width]`, experts `[T, k]` and weights float32 `[T, k]`, to `[T, width]` in x's dtype."""
        return through_experts(x, chosen, weights, self._run)

    def _run(self, x: mx.array, experts: mx.array, *, ascending: bool) -> mx.array:
        inner = relu_squared(expert_product(x, self.up, experts, sorted_indices=ascending))
        rows = inner.reshape(experts.size, -1)
        return expert_product(rows, self.down, experts.reshape(-1), sorted_indices=ascending)


class LatentExperts:
    """Experts of a narrower state beside one of the full state that every token takes."""

    def __init__(
        self, router: CorrectedRouter, experts: PlainExperts, shared: PlainMLP, latent: tuple[Linear, Linear] | None
    ) -> None:
        """`latent` are the projections to the experts' width and back."""
        self.router = router
        self.experts = experts
        self.shared = shared
        self.latent = latent

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, config: ExpertsConfig) -> Self:
        """`gate`, `experts`, `shared_experts`, and with a latent width `fc1_latent_proj` and `fc2_latent_proj`."""
        c = config
        latent = None
        if c.latent is not None:
            latent = (
                Linear.load(checkpoint, f"{prefix}.fc1_latent_proj", dtype, bias=c.bias, shape=(c.latent, c.hidden)),
                Linear.load(checkpoint, f"{prefix}.fc2_latent_proj", dtype, bias=c.bias, shape=(c.hidden, c.latent)),
            )
        return cls(
            CorrectedRouter.load(checkpoint, f"{prefix}.gate", c.router, hidden=c.hidden),
            PlainExperts.load(
                checkpoint,
                prefix,
                dtype,
                experts=c.router.experts,
                width=c.latent or c.hidden,
                intermediate=c.intermediate,
            ),
            PlainMLP.load(
                checkpoint, f"{prefix}.shared_experts", dtype, hidden=c.hidden, intermediate=c.shared, bias=c.bias
            ),
            latent,
        )

    def __call__(self, x: mx.array) -> mx.array:
        chosen, weights = self.router(x)
        if self.latent is None:
            return self.experts(x, chosen, weights) + self.shared(x)
        narrow, back = self.latent
        return back(self.experts(narrow(x), chosen, weights)) + self.shared(x)
