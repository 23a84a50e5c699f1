"""Product of packed rows with a quantised matrix in MLX's packed layout."""

from __future__ import annotations

import mlx.core as mx

from arriero.kernels import device


def quantized_matmul(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None = None,
    *,
    group_size: int,
    bits: int,
    mode: str,
    global_scale: mx.array | None = None,
    exact: bool = True,
) -> mx.array:
    """`x @ dequantised(w).T` for x `[..., in]` and w `[out, in · bits / 32]` uint32; the result has x's dtype.

    Affine scales and biases may be float16, bfloat16 or float32 whatever x is. `global_scale` (float32, scalar or one
    per output row) multiplies the result in float32, before the cast to x's dtype. Without `exact`, products of many
    16-bit rows may round them to 8 bits per group, where that is faster.
    """
    native = device.native()
    scaled_by_row = global_scale is not None and global_scale.size > 1
    if native is None or scaled_by_row or not native.supports(mode, bits, group_size, x.dtype):
        return graph(x, w, scales, biases, group_size=group_size, bits=bits, mode=mode, global_scale=global_scale)
    return native.quantized_matmul(
        x, w, scales, biases, group_size=group_size, bits=bits, mode=mode, global_scale=global_scale, exact=exact
    )


def graph(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None = None,
    *,
    group_size: int,
    bits: int,
    mode: str,
    global_scale: mx.array | None = None,
) -> mx.array:
    """Plain MLX: with scales of another float type the product is float32, cast back.

    A global scale meets a bfloat16 product after its rounding.
    """
    # A matrix with a global scale holds values up to 2688 times too large, which float16 products would not survive.
    rows = x.astype(mx.float32) if global_scale is not None and x.dtype == mx.float16 else x
    y = mx.quantized_matmul(rows, w, scales, biases, transpose=True, group_size=group_size, bits=bits, mode=mode)
    if global_scale is not None:
        y = y.astype(mx.float32) * global_scale
    return y.astype(x.dtype)
