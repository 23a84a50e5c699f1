"""Rows of a table, dense or packed."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from arriero.kernels import device
from arriero.kernels.metal import rows as metal
from arriero.kernels.packed import Packed, packable


def take_rows(table: mx.array, ids: mx.array, dtype: mx.Dtype) -> mx.array:
    """Rows `ids` `[T]` of a dense table `[rows, width]`, as `[T, width]` of `dtype`."""
    return mx.take(table, ids, axis=0).astype(dtype)


def take_quantized_rows(
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    ids: mx.array,
    *,
    group_size: int,
    bits: int,
    mode: str,
    dtype: mx.Dtype,
    global_scale: mx.array | None = None,
) -> mx.array:
    """The same of a packed table: only the rows that are asked for are decoded, in float32, then cast."""
    how: dict[str, Any] = {"group_size": group_size, "bits": bits, "mode": mode}
    if device.metal() and metal.takes(ids, dtype, **how, width=w.shape[-1] * 32 // bits):
        return metal.take(w, scales, biases, ids, **how, dtype=dtype, factors=global_scale)
    native = device.native()
    scaled_by_row = global_scale is not None and global_scale.size > 1
    # A table in MLX's layout of a format that the kernels pack belongs to nobody who multiplies with it.
    taken = native is not None and not packable(mode, bits, group_size)
    if native is not None and taken and not scaled_by_row and native.supports(mode, bits, group_size, dtype):
        return native.take_rows(
            w,
            scales,
            biases,
            ids,
            group_size=group_size,
            bits=bits,
            mode=mode,
            global_scale=global_scale,
            dtype=dtype,
        )
    rows = dequantize(
        mx.take(w, ids, axis=0),
        mx.take(scales, ids, axis=0),
        None if biases is None else mx.take(biases, ids, axis=0),
        group_size=group_size,
        bits=bits,
        mode=mode,
    )
    if global_scale is not None:
        rows = rows * (global_scale if global_scale.size == 1 else mx.take(global_scale.reshape(-1), ids)[:, None])
    return rows.astype(dtype)


def decoded_rows(
    w: mx.array,
    scales: mx.array | None,
    biases: mx.array | None,
    ids: mx.array,
    *,
    group_size: int,
    bits: int,
    mode: str,
    dtype: mx.Dtype,
    factors: mx.array | None = None,
) -> mx.array:
    """Rows `ids` `[n]` of a few packed ones `[rows, ·]`, each of which is decoded once: `[n, width]` of `dtype`.

    `factors` (float32 `[rows]`) meets the values in float32. The mode "e4m3" stands for codes of 8 bits, uint8
    `[rows, width]`, without scales.
    """
    codes = mode == "e4m3"
    width = w.shape[-1] if codes else w.shape[-1] * 32 // bits
    how: dict[str, Any] = {"group_size": group_size, "bits": bits, "mode": mode}
    if device.metal() and metal.takes(ids, dtype, **how, width=width):
        words = w.view(mx.uint32) if codes else w
        return metal.take(words, scales, biases, ids, **how, dtype=dtype, factors=factors)
    if codes or scales is None:
        values = mx.from_fp8(w, mx.float32)
    else:
        values = dequantize(w, scales, biases, group_size=group_size, bits=bits, mode=mode)
    if factors is not None:
        values = values * factors[:, None]
    return values.astype(dtype)[ids]


def take_packed_rows(
    packed: Packed, ids: mx.array, *, dtype: mx.Dtype, global_scale: mx.array | None = None
) -> mx.array:
    """The same of a table that is packed for products; `global_scale` is one number."""
    return device.required().packed_rows(packed.native, ids, global_scale=global_scale, dtype=dtype)


def dequantize(
    w: mx.array, scales: mx.array, biases: mx.array | None, *, group_size: int, bits: int, mode: str
) -> mx.array:
    """The values of packed rows, float32, without a global scale."""
    if mode == "affine":
        scales = scales.astype(mx.float32)
        biases = None if biases is None else biases.astype(mx.float32)
    width = w.shape[-1] * 32 // bits
    if mode == "nvfp4" and width % 32:
        # MLX decodes two groups at a time and refuses rows of an odd number of them.
        edges = [(0, 0)] * (w.ndim - 1)
        w, scales = mx.pad(w, [*edges, (0, 16 * bits // 32)]), mx.pad(scales, [*edges, (0, 1)])
    values = mx.dequantize(w, scales, biases, group_size=group_size, bits=bits, mode=mode, dtype=mx.float32)
    return values if values.shape[-1] == width else values[..., :width]
