"""Rows of a table, dense or packed."""

from __future__ import annotations

import mlx.core as mx


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


def dequantize(
    w: mx.array, scales: mx.array, biases: mx.array | None, *, group_size: int, bits: int, mode: str
) -> mx.array:
    """The values of packed rows, float32, without a global scale."""
    if mode == "affine":
        scales = scales.astype(mx.float32)
        biases = None if biases is None else biases.astype(mx.float32)
    return mx.dequantize(w, scales, biases, group_size=group_size, bits=bits, mode=mode, dtype=mx.float32)
