"""Norms of heads with a gate behind them, as recurrent layers end."""

from __future__ import annotations

import mlx.core as mx

from arriero.kernels import device
from arriero.kernels.activation import swiglu
from arriero.kernels.cuda import gated_norm as cuda
from arriero.kernels.cuda.attention import LONGEST
from arriero.kernels.rms_norm import rms_norm


def gated_norm(y: mx.array, rows: mx.array, z_at: int, gain: mx.array, eps: float, *, silu: bool) -> mx.array:
    """`norm(y) · gain · silu(z)`, or `· σ(z)`, computed in float32, for heads y `[T, heads, width]`.

    z stands from `z_at` on in `rows` `[T, n]`; gain is float32 `[width]`. The result is `[T, heads · width]` in the
    rows' dtype.
    """
    if y.shape[0] > LONGEST and device.cuda() is not None and cuda.takes(y, rows, z_at, gain):
        return cuda.norm(y, rows, z_at, gain, eps, silu=silu)
    width = y.shape[1] * y.shape[2]
    normed = rms_norm(y.astype(mx.float32), gain, eps).reshape(-1, width)
    z = rows[:, z_at : z_at + width].astype(mx.float32)
    return (swiglu(z, normed) if silu else mx.sigmoid(z) * normed).astype(rows.dtype)
