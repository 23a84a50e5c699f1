"""The k largest elements of each row, in few launches: pieces of rows, then the winners of all pieces."""

from __future__ import annotations

import mlx.core as mx

from arriero.kernels.metal.source import LEAST_DEVICE_VALUES, TYPES, Launch, kernel, on_device

PIECES = {256: 128, 2048: 256}
"""Elements that a threadgroup sorts at once, and its threads: 16 KiB of threadgroup memory at most."""
MOST = 1024
"""The largest k: half of the largest piece, so that every pass leaves fewer candidates."""


def takes(scores: mx.array, k: int) -> bool:
    """Whether the kernel has this."""
    return scores.dtype in TYPES and k <= MOST and 0 < scores.shape[-1] < 1 << 31 and scores.size > 0


def top_k(scores: mx.array, k: int, *, launch: Launch | None = None) -> mx.array:
    """Indices `[..., k]` int32 of the k largest of `scores` `[..., length]`, as `kernels/topk.py` orders them."""
    shape, length = scores.shape[:-1], scores.shape[-1]
    rows = scores.size // length
    values, places = on_device(scores.reshape(-1), 0), mx.array([0] * LEAST_DEVICE_VALUES, mx.uint32)
    run, keyed = launch or kernel("topk"), False
    while True:
        piece = next(size for size in PIECES if size >= length or size == max(PIECES))
        pieces = -(-length // piece)
        kept = k if pieces == 1 else min(k, piece)
        best, keys = run(
            inputs=[values, places, mx.array([length, kept], mx.uint32)],
            template=[("T", values.dtype), ("KEYED", keyed), ("PIECE", piece), ("NT", PIECES[piece])],
            grid=(PIECES[piece], pieces, rows),
            threadgroup=(PIECES[piece], 1, 1),
            output_shapes=[(rows, pieces * kept)] * 2,
            output_dtypes=[mx.uint32, mx.uint32],
        )
        if pieces == 1:
            return best.astype(mx.int32).reshape(*shape, k)
        values, places, length, keyed = (
            on_device(keys.reshape(-1), 0),
            on_device(best.reshape(-1), 0),
            pieces * kept,
            True,
        )
