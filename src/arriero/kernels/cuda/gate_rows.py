"""Gated activations of many rows that hold gate and up side by side, in one pass."""

from __future__ import annotations

import mlx.core as mx

from arriero.kernels.cuda.product import ACTIVATIONS, Activation
from arriero.kernels.cuda.source import Kernel

KERNEL = Kernel(
    name="gate_rows",
    inputs=("rows",),
    outputs=("out",),
    headers=("numbers", "formats", "product"),
    body="gate_rows_body",
    threads=256,
)
MOST = 65535
"""Rows of a launch: a grid's second size."""


def takes(rows: mx.array) -> bool:
    """Whether `gate` computes this: bfloat16 `[T, 2 · inner]` with inner a multiple of 8."""
    return rows.dtype == mx.bfloat16 and rows.ndim == 2 and rows.shape[1] % 16 == 0 and rows.shape[0] <= MOST


def gate(activation: Activation, rows: mx.array) -> mx.array:
    """`activation(gate) · up`, bfloat16 `[T, inner]`, of rows that `takes` has accepted."""
    count, inner = rows.shape[0], rows.shape[1] // 2
    made = KERNEL(
        [rows],
        {"INNER": inner, "ACTIVATION": ACTIVATIONS[activation]},
        blocks=(-(-inner // (8 * KERNEL.threads)), count, 1),
        shapes=[(count, inner)],
        dtypes=[mx.bfloat16],
    )
    return made[0]
