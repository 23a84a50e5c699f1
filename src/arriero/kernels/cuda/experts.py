"""Products of few rows with matrices of their own out of a packed bank: the experts of a decode step."""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from arriero.kernels.cuda.gpu import Gpu
from arriero.kernels.cuda.product import (
    ACTIVATIONS,
    TILE,
    Activation,
    Geometry,
    Operand,
    depth_of,
    kernel,
    template,
)

BUCKETS = (1, 8, 16, 64, 128)
"""Rows of x that kernels are compiled for: all of them lie in shared memory."""
TILES = 2
PAIRS = 256
"""The most rows times experts: beyond, sorting the rows by expert and the stock kernel read less."""


@cache
def geometry(bucket: int, columns: int, unit: int) -> tuple[Geometry, int]:
    """For `bucket` rows of x, and the warps of a block: short rows keep no more than 8 busy."""
    warps = 8 if columns // unit <= 8 else 16
    shared = bucket * columns * 2 + 2 * warps * TILES * 512 + 64 + 16 * warps * 4
    depth = depth_of(columns, unit, TILES, warps)
    return Geometry(bucket, depth, TILES, 2, shared), warps


def bucket_for(gpu: Gpu, count: int, columns: int, unit: int) -> int:
    """The rows of x that a kernel is compiled for; 0 when shared memory does not hold `count` rows."""
    for bucket in BUCKETS:
        if bucket >= count and geometry(bucket, columns, unit)[0].shared <= gpu.shared_memory:
            return bucket
    return 0


def fits(gpu: Gpu, x: mx.array, bank: Operand, indices: mx.array, *, gated: bool = False) -> bool:
    """Whether `multiply` computes this."""
    return (
        bank.experts > 0
        and x.ndim == 2
        and x.dtype == mx.bfloat16
        and x.shape[1] == bank.columns
        and indices.dtype == mx.uint32
        and 0 < indices.size <= PAIRS
        and not (gated and bank.rows % (2 * TILE))
        and bucket_for(gpu, x.shape[0], bank.columns, bank.format.unit) > 0
    )


def multiply(
    gpu: Gpu, x: mx.array, bank: Operand, indices: mx.array, *, activation: Activation | None = None
) -> mx.array:
    """Rows x `[R, columns]` through the experts `indices`, `[R]` or `[R, k]`: `[R, out]` or `[R, k, out]`, bfloat16.

    With an activation a matrix's rows are those of gate and of up, and the result is `activation(gate) · up`.
    """
    plan, warps = geometry(bucket_for(gpu, x.shape[0], bank.columns, bank.format.unit), bank.columns, bank.format.unit)
    width = bank.rows if activation is None else bank.rows // 2
    shared_by = 1 if indices.ndim == 1 else indices.shape[1]
    present = {
        name: array
        for name, array in (("biases", bank.biases), ("factors", bank.factors), ("chosen", indices))
        if array is not None
    }
    # Blocks of 8 warps stand by twos on a multiprocessor where the rows leave room.
    resident = 2 if warps == 8 and 2 * plan.shared <= gpu.shared_memory else 1
    made = kernel(frozenset(present), plan.shared, warps, resident)(
        [x, bank.w, bank.scales, *present.values()],
        {
            **template(bank, plan),
            "ACTIVATION": ACTIVATIONS[activation],
            "NORM": False,
            "WIDE_GAIN": False,
            "EPS_BITS": 0,
            "EXPERTS": True,
            "SHARED_BY": shared_by,
        },
        blocks=(gpu.multiprocessors * resident, 1, 1),
        shapes=[(*indices.shape, width)],
        dtypes=[mx.bfloat16],
    )
    return made[0]
