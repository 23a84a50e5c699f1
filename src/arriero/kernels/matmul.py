"""Product of packed rows with a dense matrix that is stored `[out, in]`."""

from __future__ import annotations

import mlx.core as mx


def matmul(x: mx.array, w: mx.array) -> mx.array:
    """`x @ w.T` for x `[..., in]` and w `[out, in]`; the result `[..., out]` has x's dtype whatever w's is."""
    return graph(x, w)


def graph(x: mx.array, w: mx.array) -> mx.array:
    """Plain MLX: computed in the promoted type, cast back."""
    return (x @ w.swapaxes(-1, -2)).astype(x.dtype)
