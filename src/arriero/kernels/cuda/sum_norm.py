"""The residual sum of many rows and its norm, in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import mlx.core as mx

from arriero.kernels.cuda.product import bits_of
from arriero.kernels.cuda.source import Kernel

WIDEST = 16384
"""Numbers of a row at most: what the registers of its block hold."""


def takes(x: mx.array, branch: mx.array, gain: mx.array | None) -> bool:
    """Whether `add` computes this: bfloat16 rows `[T, width]`, and a gain in bfloat16 or float32."""
    return (
        x.dtype == branch.dtype == mx.bfloat16
        and x.ndim == 2
        and x.shape == branch.shape
        and x.shape[1] % 8 == 0
        and x.shape[1] <= WIDEST
        and gain is not None
        and gain.dtype in (mx.bfloat16, mx.float32)
    )


@cache
def kernel(threads: int, summed: bool) -> Kernel:
    """The kernel with blocks of this size, of a sum or of what is one already."""
    return Kernel(
        name="sum_norm" if summed else "row_norm",
        inputs=("x", *(("branch",) if summed else ()), "gain"),
        outputs=("normed", *(("total",) if summed else ())),
        headers=("numbers",),
        body="sum_norm_body",
        threads=threads,
        defines=(("BRANCH", "branch" if summed else "nullptr"), ("TOTAL", "total" if summed else "nullptr")),
    )


def add(x: mx.array, branch: mx.array, gain: mx.array, eps: float) -> tuple[mx.array, mx.array]:
    """`x + branch` and its norm times the gain, both bfloat16 `[T, width]`, of rows that `takes` has accepted."""
    normed, total = _launch([x, branch], gain, eps)
    return total, normed


def norm(x: mx.array, gain: mx.array, eps: float) -> mx.array:
    """The norm of x times the gain, bfloat16 `[T, width]`, where `takes` has accepted x as its own branch."""
    return _launch([x], gain, eps)[0]


def _launch(rows: Sequence[mx.array], gain: mx.array, eps: float) -> list[mx.array]:
    count, width = rows[0].shape
    # Two pieces of 8 a thread, where that makes whole warps.
    threads = min(512, max(64, -(-width // 16 // 32) * 32))
    return kernel(threads, len(rows) > 1)(
        [*rows, gain],
        {"WIDTH": width, "WIDE_GAIN": gain.dtype == mx.float32, "SUM": len(rows) > 1, "EPS_BITS": bits_of(eps)},
        blocks=(count, 1, 1),
        shapes=[rows[0].shape] * len(rows),
        dtypes=[mx.bfloat16] * len(rows),
    )
