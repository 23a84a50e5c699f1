"""Products of few rows with matrices of their own out of a packed bank: the experts of a decode step."""

from __future__ import annotations

from typing import Literal

import mlx.core as mx

from arriero.kernels.metal.product import ACTIVATIONS, FORMATS, Operand, run
from arriero.kernels.metal.source import TYPES, Launch

PAIRS = 256
"""The most rows times experts: each pair reads its matrix alone. Of more, plain MLX sorts them and shares it."""


def takes(x: mx.array, bank: Operand, indices: mx.array, *, activation: str | None = None) -> bool:
    """Whether `multiply` computes this."""
    scale = bank.global_scale
    return (
        x.ndim == 2
        and x.dtype in TYPES
        and bank.w.ndim == 3
        and (bank.mode, bank.bits, bank.group_size) in FORMATS
        and indices.dtype == mx.uint32
        and 0 < indices.size <= PAIRS
        and (scale is None or scale.size in (1, bank.w.shape[0]))
        and activation in ACTIVATIONS
    )


def multiply(
    x: mx.array,
    bank: Operand,
    indices: mx.array,
    *,
    activation: Literal["silu", "gelu_tanh"] | None = None,
    launch: Launch | None = None,
) -> mx.array:
    """Rows x `[R, in]` through the experts `indices`, `[R]` or `[R, k]`: `[R, out]` or `[R, k, out]`, in x's dtype.

    With an activation a matrix's rows are those of gate and of up, and the result is `activation(gate) · up`.
    """
    pairs = indices.size
    y, _ = run(x, bank, turns=pairs, lines=pairs, tile=1, activation=activation, chosen=indices, launch=launch)
    return y if indices.ndim == 1 else y.reshape(*indices.shape, y.shape[-1])
