"""A mixture of experts to which experts that every token takes are added as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, Self, runtime_checkable

import mlx.core as mx

from arriero.kernels import device
from arriero.kernels.cuda.router import Choice
from arriero.kernels.matrix import Matrix
from arriero.kernels.sparse_part import SparsePart
from arriero.model.checkpoint import Checkpoint
from arriero.model.layers.block import FeedForward
from arriero.model.layers.config import Fields
from arriero.model.layers.experts import Experts
from arriero.model.layers.linear import Linear
from arriero.model.layers.mlp import Activation, GatedMLP
from arriero.model.layers.norm import RMSNorm

ChooseExperts = Callable[[mx.array], tuple[mx.array, mx.array]]
"""x `[T, hidden]` to experts, uint32 `[T, k]`, and their weights, float32 `[T, k]`."""


@dataclass(frozen=True)
class SummedConfig:
    """Sizes of the feed-forward parts of all layers."""

    hidden: int
    dense: int
    """Width of the layers without experts."""
    experts: int
    width: int
    """Of one expert."""
    shared: int
    """How many experts every token takes; they are stored as one."""
    activation: Activation
    sparse: frozenset[int]
    """The layers with experts."""

    @classmethod
    def read(
        cls,
        fields: Fields,
        *,
        hidden: int,
        layers: int,
        dense: int,
        experts: int,
        activation: Activation,
        first: int,
        shared: int,
    ) -> Self:
        """From `moe_intermediate_size`, `n_shared_experts` (`shared`), and which layers are sparse.

        By `mlp_layer_types`, else every `moe_layer_freq`-th (1) of those from `first_k_dense_replace` (`first`) on.
        """
        types = fields.strings("mlp_layer_types", layers, ("dense", "sparse"))
        lead = fields.integer("first_k_dense_replace", first, minimum=0)
        step = fields.integer("moe_layer_freq", 1)
        if types is None:
            types = ["sparse" if i >= lead and i % step == 0 else "dense" for i in range(layers)]
        return cls(
            hidden=hidden,
            dense=dense,
            experts=experts,
            width=fields.integer("moe_intermediate_size"),
            shared=fields.integer("n_shared_experts", shared, minimum=0),
            activation=activation,
            sparse=frozenset(i for i, kind in enumerate(types) if kind == "sparse"),
        )


class SummedExperts:
    """`Σ weight · expert(x)` over the experts of a token, and the shared ones on top."""

    def __init__(self, router: ChooseExperts, experts: Experts, shared: GatedMLP | None) -> None:
        self.router = router
        self.experts = experts
        self.shared = shared
        self.part = _part(router, experts, shared)

    def __call__(self, x: mx.array) -> mx.array:
        few = None if self.part is None else self.part(x)
        return self._by_operations(x) if few is None else few

    def after(self, x: mx.array, branch: mx.array, norm: RMSNorm) -> mx.array:
        """`h + self(norm(h))` with `h = x + branch`."""
        few = None if self.part is None else self.part(x, branch, norm.pair)
        if few is not None:
            return few
        x, normed = norm.of_sum(x, branch)
        return x + self._by_operations(normed)

    def _by_operations(self, x: mx.array) -> mx.array:
        y = self.experts(x, *self.router(x))
        return y if self.shared is None else y + self.shared(x)


@runtime_checkable
class KernelRouter(Protocol):
    """A router whose choices the CUDA kernels may make."""

    gate: Linear
    """In float32."""

    @property
    def choice(self) -> Choice | None: ...


def _part(router: ChooseExperts, experts: Experts, shared: GatedMLP | None) -> SparsePart | None:
    """All of the mixture as kernels of NVIDIA GPUs take it; None where there are none, or they don't."""
    if device.cuda() is None or not isinstance(router, KernelRouter) or router.gate.weight.quantization is not None:
        return None
    choice, wide = router.choice, router.gate.weight.data
    narrow = wide.astype(mx.bfloat16)
    alike = shared is None or shared.activation == experts.activation
    # Most routers are published in bfloat16, and computed in float32.
    if choice is None or not alike or not mx.array_equal(narrow.astype(mx.float32), wide).item():
        return None
    return SparsePart(
        Matrix(narrow),
        choice if shared is None else replace(choice, whole=True),
        experts.part,
        one_gate_up=() if shared is None else shared.gate_up.matrices,
        one_down=None if shared is None else shared.down.matrix,
    )


def load_feed_forward(
    checkpoint: Checkpoint,
    prefix: str,
    dtype: mx.Dtype,
    config: SummedConfig,
    index: int,
    load_router: Callable[[str], ChooseExperts],
) -> FeedForward:
    """The dense network of layer `index`, or its experts with the router that `load_router(prefix)` gives."""
    c = config

    def gated(prefix: str, width: int) -> GatedMLP:
        return GatedMLP.load(
            checkpoint, prefix, dtype, hidden=c.hidden, intermediate=width, activation=c.activation, bias=False
        )

    if index not in c.sparse:
        return gated(prefix, c.dense)
    experts = Experts.load(
        checkpoint,
        prefix,
        dtype,
        experts=c.experts,
        hidden=c.hidden,
        intermediate=c.width,
        activation=c.activation,
    )
    shared = gated(f"{prefix}.shared_experts", c.shared * c.width) if c.shared else None
    return SummedExperts(load_router(f"{prefix}.gate"), experts, shared)
