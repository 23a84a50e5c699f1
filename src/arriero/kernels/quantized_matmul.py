"""Product of packed rows with a quantised matrix, in MLX's layout or in that of the CPU kernels."""

from __future__ import annotations

import mlx.core as mx

from arriero.kernels import device
from arriero.kernels.cuda import dequantize, prompt_product
from arriero.kernels.cuda.gpu import Gpu
from arriero.kernels.cuda.product import Operand, fits, multiply, operand
from arriero.kernels.metal import product as metal
from arriero.kernels.packed import Packed, pack


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

    On the CPU the kernels want most formats packed: a matrix that is used again is better packed once (`pack`).
    """
    gpu = device.cuda()
    if gpu is not None and x.dtype == mx.bfloat16:
        matrix = operand(w, scales, biases, group_size=group_size, bits=bits, mode=mode, global_scale=global_scale)
        y = None if matrix is None else on_cuda(gpu, x, matrix)
        if y is not None:
            return y
    if device.metal() and metal.takes(x, mode=mode, bits=bits, group_size=group_size):
        return metal.multiply(
            x, w, scales, biases, mode=mode, bits=bits, group_size=group_size, global_scale=global_scale
        )
    native = device.native()
    if native is None or (global_scale is not None and global_scale.size > 1):
        return graph(x, w, scales, biases, group_size=group_size, bits=bits, mode=mode, global_scale=global_scale)
    packed = pack(w, scales, biases, group_size=group_size, bits=bits, mode=mode)
    if packed is not None:
        return packed_matmul(x, packed, global_scale=global_scale, exact=exact)
    if not native.supports(mode, bits, group_size, x.dtype):
        return graph(x, w, scales, biases, group_size=group_size, bits=bits, mode=mode, global_scale=global_scale)
    return native.quantized_matmul(
        x, w, scales, biases, group_size=group_size, bits=bits, mode=mode, global_scale=global_scale, exact=exact
    )


def on_cuda(gpu: Gpu, x: mx.array, matrix: Operand) -> mx.array | None:
    """Few rows by one kernel, many by `of_many`; None where neither takes this."""
    y = of_many(gpu, x, matrix)
    if y is not None:
        return y
    rows = x.reshape(-1, x.shape[-1])
    if not fits(matrix, gpu, rows.shape[0]):
        return None
    y = multiply(gpu, rows, matrix).y
    return y if x.ndim == 2 else y.reshape(*x.shape[:-1], matrix.rows)


def of_many(gpu: Gpu, x: mx.array, matrix: Operand, residual: mx.array | None = None) -> mx.array | None:
    """A product of many rows with a matrix decoded on the way or beforehand; None where neither takes this."""
    if prompt_product.takes(gpu, x, matrix):
        return prompt_product.multiply(gpu, x, matrix, residual)
    return dequantize.multiply(x, matrix, residual) if dequantize.takes(x, matrix) else None


def packed_matmul(x: mx.array, packed: Packed, *, global_scale: mx.array | None = None, exact: bool = True) -> mx.array:
    """The same of a matrix that is packed; `global_scale` is one number."""
    return device.required().packed_matmul(x, packed.native, global_scale=global_scale, exact=exact)


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
