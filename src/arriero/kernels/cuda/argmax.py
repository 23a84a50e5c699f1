"""The largest element of each row in one launch."""

from __future__ import annotations

from functools import cache
from math import prod

import mlx.core as mx

from arriero.kernels.cuda.source import Kernel, argument

PARTS = 32
"""Blocks that share a row."""
SHORT = 8192
"""Elements that one block is soon done with."""
ROWS = 4096
"""The most rows."""

KERNEL = Kernel(
    name="argmax",
    inputs=("scores", "arrived"),
    outputs=("out", "parts"),
    headers=("numbers",),
    body="argmax_body",
    threads=256,
)


def fits(scores: mx.array) -> bool:
    """Whether `argmax` takes these."""
    return (
        scores.dtype in (mx.float32, mx.bfloat16)
        and 0 < scores.shape[-1] < 1 << 31
        and 0 < scores.size // scores.shape[-1] <= ROWS
    )


@cache
def _arrived() -> mx.array:
    """Zeros that each launch leaves zero."""
    made = argument(mx.zeros((ROWS,), mx.uint32))
    mx.eval(made)
    return made


def argmax(scores: mx.array, *, in_place: bool = False) -> mx.array:
    """Index `[...]` uint32 of the largest of `scores` `[..., length]`, as `kernels/topk.py` orders them.

    Several blocks share a row where launches follow one another, so that they may count in place (`Gpu.in_place`).
    """
    shape = scores.shape[:-1]
    rows = prod(shape)
    parts = PARTS if in_place and scores.shape[-1] > SHORT else 1
    made = KERNEL(
        [scores, _arrived()],
        {"LENGTH": scores.shape[-1], "WIDE": scores.dtype == mx.float32, "PARTS": parts},
        blocks=(parts, rows, 1),
        shapes=[shape, (rows * parts * 2,)],
        dtypes=[mx.uint32, mx.uint32],
    )
    return made[0]
