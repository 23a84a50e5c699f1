"""Norms of heads and the gates behind them, of many rows, in one pass."""

from __future__ import annotations

import mlx.core as mx

from arriero.kernels.cuda.product import bits_of
from arriero.kernels.cuda.source import Kernel

WIDTHS = (32, 64, 128, 256)
KERNEL = Kernel(
    name="gated_norm",
    inputs=("y", "rows", "gain"),
    outputs=("out",),
    headers=("numbers",),
    body="gated_norm_body",
    threads=128,
)
MOST = 65535
"""Rows of a launch: a grid's second size."""


def takes(y: mx.array, rows: mx.array, z_at: int, gain: mx.array) -> bool:
    """Whether `norm` computes this: bfloat16 y `[T, heads, width]` and rows `[T, n]`, a gain in float32."""
    return (
        y.dtype == rows.dtype == mx.bfloat16
        and gain.dtype == mx.float32
        and y.ndim == 3
        and y.shape[2] in WIDTHS
        and y.shape[0] <= MOST
        and rows.shape[1] % 8 == 0
        and z_at % 8 == 0
    )


def norm(y: mx.array, rows: mx.array, z_at: int, gain: mx.array, eps: float, *, silu: bool) -> mx.array:
    """`norm(y) · gain · silu(z)` or `· σ(z)`, bfloat16 `[T, heads · width]`; z begins at `z_at` of the rows."""
    count, heads, width = y.shape
    made = KERNEL(
        [y, rows, gain],
        {
            "HEADS": heads,
            "WIDTH": width,
            "STRIDE": rows.shape[1],
            "Z_AT": z_at,
            "SILU": silu,
            "EPS_BITS": bits_of(eps),
        },
        blocks=(-(-heads * width // (8 * KERNEL.threads)), count, 1),
        shapes=[(count, heads * width)],
        dtypes=[mx.bfloat16],
    )
    return made[0]
