"""A few numbers in arrays so small that the host can read them without their memory moving.

MLX keeps arrays of up to 8 bytes in memory that host and device share. When the host reads a larger one, its memory is
moved to pages that host and device then take from each other: half a millisecond a step (H200).
"""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from arriero.kernels.cuda.source import Kernel

MOST = 32
"""The most numbers; each two are an output of the kernel."""


@cache
def kernel(count: int) -> Kernel:
    """The kernel for `count` numbers."""
    outputs = tuple(f"pair{i}" for i in range(-(-count // 2)))
    stores = " ".join(f"pair{i // 2}[{i % 2}] = numbers[{i}];" for i in range(count))
    return Kernel(
        name="pairs",
        inputs=("numbers",),
        outputs=outputs,
        headers=("numbers",),
        body="pairs_body",
        threads=32,
        defines=(("STORES", stores),),
    )


def pairs(numbers: mx.array) -> list[mx.array]:
    """Uint32 `[n]`, up to `MOST`, two by two."""
    count = numbers.shape[0]
    sizes = [2] * (count // 2) + [1] * (count % 2)
    return kernel(count)(
        [numbers], {}, blocks=(1, 1, 1), shapes=[(size,) for size in sizes], dtypes=[mx.uint32] * len(sizes)
    )
