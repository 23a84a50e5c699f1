"""Products of few rows with a small dense matrix, with the norm before them, in one launch."""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from arriero.kernels.cuda.gpu import Gpu
from arriero.kernels.cuda.product import Norm, bits_of
from arriero.kernels.cuda.source import Kernel

WARPS = 8
BUCKETS = (1, 8, 16, 32)
"""Rows of x that kernels are compiled for."""
MOST = 2048
"""Rows of a small matrix, which few blocks read through."""


def shared_bytes(bucket: int, columns: int) -> int:
    """Shared memory of a block."""
    return bucket * columns * 2 + bucket * WARPS * 4


def bucket_for(gpu: Gpu, count: int, columns: int) -> int:
    """The rows of x that a kernel is compiled for; 0 when shared memory does not hold `count` rows."""
    fitting = [b for b in BUCKETS if b >= count and shared_bytes(b, columns) <= gpu.shared_memory]
    return min(fitting, default=0)


def fits(gpu: Gpu, x: mx.array, w: mx.array) -> bool:
    """Whether `multiply` takes rows x `[T, columns]` and w `[rows, columns]`."""
    return (
        x.dtype == w.dtype == mx.bfloat16
        and w.ndim == 2
        and w.shape[0] <= MOST
        and w.shape[1] % 8 == 0
        and bucket_for(gpu, x.shape[0], w.shape[1]) > 0
    )


@cache
def _kernel(normed: bool, shared: int) -> Kernel:
    return Kernel(
        name="dense",
        inputs=("x", "w", *(("gain",) if normed else ())),
        outputs=("out",),
        headers=("numbers", "dense"),
        body="dense_body",
        threads=32 * WARPS,
        shared=shared,
        defines=(("GAIN", "gain" if normed else "nullptr"),),
    )


def multiply(gpu: Gpu, x: mx.array, w: mx.array, norm: Norm | None = None) -> mx.array:
    """`norm(x) @ Wᵀ`, bfloat16 `[T, rows]`, for what `fits` has accepted."""
    bucket = bucket_for(gpu, *x.shape)
    made = _kernel(norm is not None, shared_bytes(bucket, w.shape[1]))(
        [x, w, *([] if norm is None else [norm[0]])],
        {
            "N_": w.shape[0],
            "K_": w.shape[1],
            "ROWS": bucket,
            "WIDE_GAIN": norm is not None and norm[0].dtype == mx.float32,
            "EPS_BITS": bits_of(0.0 if norm is None else norm[1]),
        },
        blocks=(-(-w.shape[0] // WARPS), 1, 1),
        shapes=[(x.shape[0], w.shape[0])],
        dtypes=[mx.bfloat16],
    )
    return made[0]
