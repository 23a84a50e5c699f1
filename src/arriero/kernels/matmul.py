"""Product of packed rows with a dense matrix that is stored `[out, in]`."""

from __future__ import annotations

import mlx.core as mx

from arriero.kernels import device


def matmul(x: mx.array, w: mx.array) -> mx.array:
    """`x @ w.T` for x `[..., in]` and w `[out, in]`; the result `[..., out]` has x's dtype whatever w's is."""
    native = device.native()
    return graph(x, w) if native is None else native.matmul(x, w)


def graph(x: mx.array, w: mx.array) -> mx.array:
    """Plain MLX: computed in the promoted type, cast back."""
    return (x @ w.swapaxes(-1, -2)).astype(x.dtype)
