"""Products of few rows with a dense matrix in bfloat16, with the norm before it and the bias in the same launch."""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from arriero.kernels.cuda.gpu import Gpu
from arriero.kernels.cuda.product import Norm, bits_of
from arriero.kernels.cuda.router import WARPS, shared_bytes
from arriero.kernels.cuda.source import Kernel

BUCKETS = (1, 2)
"""Rows of x that kernels are compiled for. With more the tensor cores of MLX's product pay."""
MOST_OUT = 16384
"""Rows of a matrix up to which a launch less counts for more than how it is read."""
RESIDENT = 2
"""Blocks that a multiprocessor may hold at once."""


def bucket_for(gpu: Gpu, count: int, columns: int) -> int:
    """The rows of x that a kernel is compiled for; 0 when there are too many."""
    fitting = [b for b in BUCKETS if b >= count and shared_bytes(b, columns) <= gpu.shared_memory]
    return min(fitting, default=0)


def fits(gpu: Gpu, x: mx.array, w: mx.array, bias: mx.array | None) -> bool:
    """Whether `multiply` takes rows x `[T, columns]` and a matrix w `[out, columns]`."""
    return (
        x.dtype == w.dtype == mx.bfloat16
        and (bias is None or bias.dtype == mx.bfloat16)
        and w.ndim == x.ndim == 2
        and w.shape[0] <= MOST_OUT
        and w.shape[1] % 8 == 0
        and bucket_for(gpu, x.shape[0], w.shape[1]) > 0
    )


@cache
def kernel(normed: bool, biased: bool, shared: int) -> Kernel:
    """The kernel with these optional arguments."""
    given = {"gain": normed, "bias": biased}
    return Kernel(
        name="dense",
        inputs=("x", "w", *(name for name, there in given.items() if there)),
        outputs=("out",),
        headers=("numbers", "router"),
        body="dense_body",
        threads=32 * WARPS,
        shared=shared,
        defines=tuple((name.upper(), name if there else "nullptr") for name, there in given.items()),
    )


def multiply(gpu: Gpu, x: mx.array, w: mx.array, *, norm: Norm | None = None, bias: mx.array | None = None) -> mx.array:
    """`norm(x) @ wᵀ (+ bias)`, bfloat16 `[T, out]`; sums are float32."""
    (count, columns), out = x.shape, w.shape[0]
    bucket = bucket_for(gpu, count, columns)
    given = [array for array in (None if norm is None else norm[0], bias) if array is not None]
    made = kernel(norm is not None, bias is not None, shared_bytes(bucket, columns))(
        [x, w, *given],
        {
            "N_": out,
            "K_": columns,
            "ROWS": bucket,
            "WIDE_GAIN": norm is not None and norm[0].dtype == mx.float32,
            "EPS_BITS": bits_of(0.0 if norm is None else norm[1]),
        },
        blocks=(min(-(-out // WARPS), gpu.multiprocessors * RESIDENT), 1, 1),
        shapes=[(count, out)],
        dtypes=[mx.bfloat16],
    )
    return made[0]
