"""The k largest elements of each row, by digits of their keys: one launch, or two for rows as long as a vocabulary."""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from arriero.kernels.cuda.source import Kernel

PIECE = 16384
"""Elements of a row that one block of threads looks through."""
MOST = 2048
"""The largest k: what is sorted in shared memory."""
SHORT = 2048
"""Elements up to which a block has few threads."""


def takes(scores: mx.array, k: int) -> bool:
    """Whether the kernel has this."""
    return (
        scores.dtype in (mx.float32, mx.bfloat16) and k <= MOST and 0 < scores.shape[-1] < 1 << 31 and scores.size > 0
    )


@cache
def kernel(threads: int, keyed: bool, keys: bool) -> Kernel:
    """The kernel for numbers or for keys with their places; it gives keys too where another run follows."""
    return Kernel(
        name="topk",
        inputs=("scores", *(("places",) if keyed else ())),
        outputs=("best", *(("keys",) if keys else ())),
        headers=("numbers", "topk"),
        body="topk_body",
        threads=threads,
        defines=(("PLACES", "places" if keyed else "nullptr"), ("MORE", "keys" if keys else "nullptr")),
    )


def top_k(scores: mx.array, k: int) -> mx.array:
    """Indices `[..., k]` int32 of the k largest of `scores` `[..., length]`, as `kernels/topk.py` orders them."""
    shape, length = scores.shape[:-1], scores.shape[-1]
    values, places = scores.reshape(-1, length), None
    while True:
        pieces = -(-length // PIECE)
        made = kernel(128 if length <= SHORT else 1024, places is not None, pieces > 1)(
            [values, *(() if places is None else (places,))],
            {
                "K": k,
                "SPAN_": PIECE,
                "SORTED": power_of_two(k),
                "WIDE": values.dtype != mx.bfloat16,
                "KEYED": places is not None,
                "KEYS": pieces > 1,
            },
            blocks=(pieces, values.shape[0], 1),
            shapes=[(values.shape[0], pieces * k)] * (2 if pieces > 1 else 1),
            dtypes=[mx.int32, mx.uint32][: 2 if pieces > 1 else 1],
        )
        if pieces == 1:
            return made[0].reshape(*shape, k)
        places, values, length = made[0], made[1], pieces * k


def power_of_two(count: int) -> int:
    """The least that is no less, and at least 2."""
    return max(2, 1 << (count - 1).bit_length())
