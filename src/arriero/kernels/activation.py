"""Element-wise functions: gated activations and the soft cap. Each result has its input's dtype."""

from __future__ import annotations

import math
from typing import Literal

import mlx.core as mx

from arriero.kernels import device
from arriero.kernels.cuda import gate_rows
from arriero.kernels.cuda.attention import LONGEST

Activation = Literal["silu", "gelu_tanh", "gelu"]

# 16-bit inputs are computed in float32 and rounded once: a chain of rounded products loses two bits.


def gated(activation: Activation, gate: mx.array, up: mx.array) -> mx.array:
    """`activation(gate) · up`."""
    if activation == "silu":
        return swiglu(gate, up)
    return geglu(gate, up, tanh=activation == "gelu_tanh")


def gated_rows(activation: Activation, rows: mx.array) -> mx.array:
    """The same of rows `[T, 2 · inner]` that hold gate and then up."""
    if rows.shape[0] > LONGEST and device.cuda() is not None and gate_rows.takes(rows):
        return gate_rows.gate(activation, rows)
    return gated(activation, *mx.split(rows, 2, axis=-1))


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """`silu(gate) · up`. Source: Shazeer, GLU variants, 2020."""
    native = device.native()
    return swiglu_graph(gate, up) if native is None else native.swiglu(gate, up)


@device.fused
def swiglu_graph(gate: mx.array, up: mx.array) -> mx.array:
    """Plain MLX."""
    g = gate.astype(mx.float32)
    return (g * mx.sigmoid(g) * up.astype(mx.float32)).astype(gate.dtype)


def geglu(gate: mx.array, up: mx.array, *, tanh: bool = True) -> mx.array:
    """`gelu(gate) · up`, with gelu's tanh form or its exact form by erf."""
    native = device.native()
    return geglu_graph(gate, up, tanh=tanh) if native is None or not tanh else native.geglu(gate, up)


@device.fused
def geglu_graph(gate: mx.array, up: mx.array, *, tanh: bool = True) -> mx.array:
    """Plain MLX."""
    g = gate.astype(mx.float32)
    if tanh:
        inner = 1 + mx.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g * g * g))
    else:
        inner = 1 + mx.erf(g * math.sqrt(0.5))
    return (0.5 * g * inner * up.astype(mx.float32)).astype(gate.dtype)


@device.fused
def softcap(x: mx.array, cap: float) -> mx.array:
    """`cap · tanh(x / cap)`."""
    return (mx.tanh(x.astype(mx.float32) / cap) * cap).astype(x.dtype)


@device.fused
def sigmoid_gate(x: mx.array, gate: mx.array) -> mx.array:
    """`x · σ(gate)`, where gate may be one number a row `[…, 1]`."""
    return (x.astype(mx.float32) * mx.sigmoid(gate.astype(mx.float32))).astype(x.dtype)
