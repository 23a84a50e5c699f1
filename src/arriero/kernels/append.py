"""Writing new keys or values into a cache's buffer."""

from __future__ import annotations

import mlx.core as mx

from arriero.kernels import device


def append(buffer: mx.array, update: mx.array, start: int) -> mx.array:
    """`buffer` `[1, heads, capacity, D]` with `update` `[1, heads, L, D]` at tokens `[start, start + L)`.

    Use the result instead of the buffer from then on: the buffer's memory is reused when nobody else holds it, and a
    device version may write in place even then. ValueError when the update does not fit.
    """
    end = start + update.shape[2]
    if start < 0 or end > buffer.shape[2]:
        raise ValueError(f"tokens [{start}, {end}) do not fit a buffer of {buffer.shape[2]}")
    native = device.native()
    return graph(buffer, update, start) if native is None else native.kv_append(buffer, update, start)


def graph(buffer: mx.array, update: mx.array, start: int) -> mx.array:
    """Plain MLX."""
    return mx.slice_update(buffer, update.astype(buffer.dtype), mx.array([start], mx.int32), axes=[2])
