"""The convolution of DFlash 2's blocks in one launch."""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from arriero.kernels.cuda.source import Kernel

THREADS = 256


def takes(x: mx.array, base: mx.array, dynamic: mx.array, group: int) -> bool:
    """Whether `convolve` computes this: bfloat16, two channels of one group to a thread."""
    return group % 2 == 0 and x.dtype == base.dtype == dynamic.dtype == mx.bfloat16


@cache
def kernel(residual: bool) -> Kernel:
    """With a residual or without."""
    return Kernel(
        name="block_conv",
        inputs=("x", "base", "dynamic", *(["residual"] if residual else [])),
        outputs=("y",),
        headers=("numbers",),
        body="block_conv_body",
        threads=THREADS,
        defines=(("RESIDUAL", "residual" if residual else "nullptr"),),
    )


def convolve(
    x: mx.array, base: mx.array, dynamic: mx.array, *, side: int, group: int, residual: mx.array | None = None
) -> mx.array:
    """Rows x `[T, width]` of one block, and `residual` of the same shape, to their sum after the convolution.

    `base` is `[2, taps, width]`, `dynamic` `[T, 2 · taps · width / group]`, `side` which of the two is meant. Every
    step rounds as plain operations do.
    """
    rows, width = x.shape
    made = kernel(residual is not None)(
        [x, base, dynamic, *([] if residual is None else [residual])],
        {"WIDTH": width, "ROWS": rows, "TAPS": base.shape[1], "GROUP": group, "SIDE": side},
        blocks=(-(-rows * width // (2 * THREADS)), 1, 1),
        shapes=[(rows, width)],
        dtypes=[mx.bfloat16],
    )
    return made[0]
