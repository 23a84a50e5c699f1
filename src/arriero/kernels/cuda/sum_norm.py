"""The residual sum of many rows and its norm, in one pass."""

from __future__ import annotations

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
def kernel(threads: int) -> Kernel:
    """The kernel with blocks of this size."""
    return Kernel(
        name="sum_norm",
        inputs=("x", "branch", "gain"),
        outputs=("total", "normed"),
        headers=("numbers",),
        body="sum_norm_body",
        threads=threads,
    )


def add(x: mx.array, branch: mx.array, gain: mx.array, eps: float) -> tuple[mx.array, mx.array]:
    """`x + branch` and its norm times the gain, both bfloat16 `[T, width]`, of rows that `takes` has accepted."""
    count, width = x.shape
    # Two pieces of 8 a thread, where that makes whole warps.
    threads = min(512, max(64, -(-width // 16 // 32) * 32))
    total, normed = kernel(threads)(
        [x, branch, gain],
        {"WIDTH": width, "WIDE_GAIN": gain.dtype == mx.float32, "EPS_BITS": bits_of(eps)},
        blocks=(count, 1, 1),
        shapes=[x.shape, x.shape],
        dtypes=[mx.bfloat16, mx.bfloat16],
    )
    return total, normed
