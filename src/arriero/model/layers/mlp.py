"""Gated feed-forward layers."""

from __future__ import annotations

from typing import Self

import mlx.core as mx

from arriero.kernels.activation import Activation, gated, gated_rows
from arriero.kernels.gated_part import GatedPart
from arriero.model.checkpoint import Checkpoint
from arriero.model.layers.config import Fields
from arriero.model.layers.linear import FusedLinear, Linear
from arriero.model.layers.norm import RMSNorm

__all__ = ["ACTIVATIONS", "Activation", "GatedMLP", "activation", "gated"]

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
"""Names in `hidden_act` and what they mean here."""


def activation(fields: Fields, name: str, *, default: Activation) -> Activation:
    """The activation that a configuration's field names; CheckpointError when we have no such function."""
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, str) or value not in ACTIVATIONS:
        raise fields.wrong(name, "one of " + ", ".join(ACTIVATIONS), value)
    return ACTIVATIONS[value]


class GatedMLP:
    """`down(activation(gate(x)) · up(x))`."""

    def __init__(self, gate: Linear, up: Linear, down: Linear, activation: Activation) -> None:
        self.gate_up = FusedLinear([gate, up])
        self.down = down
        down.weight.packed()
        self.activation: Activation = activation

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        prefix: str,
        dtype: mx.Dtype,
        *,
        hidden: int,
        intermediate: int,
        activation: Activation = "silu",
        bias: bool | None = None,
    ) -> Self:
        """`gate_proj`, `up_proj` and `down_proj` under `prefix`."""
        gate, up = (
            Linear.load(checkpoint, f"{prefix}.{name}", dtype, bias=bias, shape=(intermediate, hidden))
            for name in ("gate_proj", "up_proj")
        )
        down = Linear.load(checkpoint, f"{prefix}.down_proj", dtype, bias=bias, shape=(hidden, intermediate))
        return cls(gate, up, down, activation)

    def __call__(self, x: mx.array) -> mx.array:
        products = [matrix(x) for matrix in self.gate_up.matrices]
        one = len(products) == 1
        return self.down(gated_rows(self.activation, products[0]) if one else gated(self.activation, *products))

    def part(self, before: RMSNorm, after: RMSNorm | None = None) -> GatedPart:
        """With the norms around it and the residual sum, as one operation."""
        return GatedPart(
            before.pair,
            self.gate_up.matrices,
            self.down.matrix,
            self.activation,
            None if after is None else after.pair,
        )
