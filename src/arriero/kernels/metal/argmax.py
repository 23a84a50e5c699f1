"""The largest element of each row in one launch."""

from __future__ import annotations

import mlx.core as mx

from arriero.kernels.metal.source import TYPES, Launch, kernel

WIDTHS = (32, 1024)
"""Threads of a row's threadgroup: of short rows, and of long ones."""


def takes(scores: mx.array) -> bool:
    """Whether the kernel has this."""
    return scores.dtype in TYPES and 0 < scores.shape[-1] < 1 << 31 and scores.size > 0


def argmax(scores: mx.array, *, launch: Launch | None = None) -> mx.array:
    """Index `[...]` uint32 of the largest of `scores` `[..., length]`, as `kernels/topk.py` orders them."""
    shape, length = scores.shape[:-1], scores.shape[-1]
    width = WIDTHS[0] if length <= WIDTHS[1] else WIDTHS[1]
    made = (launch or kernel("argmax"))(
        inputs=[scores, mx.array([length], mx.uint32)],
        template=[("T", scores.dtype), ("NT", width)],
        grid=(width, scores.size // length, 1),
        threadgroup=(width, 1, 1),
        output_shapes=[shape],
        output_dtypes=[mx.uint32],
    )
    return made[0]
