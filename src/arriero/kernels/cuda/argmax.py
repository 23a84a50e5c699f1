"""The largest element of each row in one launch."""

from __future__ import annotations

from math import prod

import mlx.core as mx

from arriero.kernels.cuda.source import Kernel

KERNEL = Kernel(
    name="argmax",
    inputs=("scores",),
    outputs=("out",),
    headers=("numbers",),
    body="argmax_body",
    threads=1024,
)


def fits(scores: mx.array) -> bool:
    """Whether `argmax` takes these."""
    return scores.dtype in (mx.float32, mx.bfloat16) and 0 < scores.shape[-1] < 1 << 31 and scores.size > 0


def argmax(scores: mx.array) -> mx.array:
    """Index `[...]` uint32 of the largest of `scores` `[..., length]`, as `kernels/topk.py` orders them."""
    shape = scores.shape[:-1]
    made = KERNEL(
        [scores],
        {"LENGTH": scores.shape[-1], "WIDE": scores.dtype == mx.float32},
        blocks=(prod(shape), 1, 1),
        shapes=[shape],
        dtypes=[mx.uint32],
    )
    return made[0]
