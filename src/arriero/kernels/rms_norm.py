"""Root mean square normalisation over the last axis."""

from __future__ import annotations

import mlx.core as mx

from arriero.kernels import device
from arriero.kernels.cuda import sum_norm
from arriero.kernels.cuda.attention import LONGEST


def rms_norm(x: mx.array, gain: mx.array | None, eps: float) -> mx.array:
    """`x / sqrt(mean(x²) + eps) · gain`, computed in float32; the result has x's dtype.

    A float32 gain is applied before the result is rounded to x's dtype. Source: Zhang and Sennrich, 2019.
    """
    native = device.native()
    if native is not None:
        return native.rms_norm(x, gain, eps)
    # MLX has a kernel for gains of x's own type.
    if gain is not None and gain.dtype != x.dtype and _on_cuda(x, x, gain):
        return sum_norm.norm(x, gain, eps)
    return graph(x, gain, eps)


def add_rms_norm(x: mx.array, branch: mx.array, gain: mx.array | None, eps: float) -> tuple[mx.array, mx.array]:
    """`x + branch` and its `rms_norm`, both in x's dtype: the step between two parts of a residual block."""
    native = device.native()
    if native is not None and branch.dtype == x.dtype:
        return native.add_rms_norm(x, branch, gain, eps)
    if gain is not None and _on_cuda(x, branch, gain):
        return sum_norm.add(x, branch, gain, eps)
    total = x + branch.astype(x.dtype)
    return total, rms_norm(total, gain, eps)


def _on_cuda(x: mx.array, branch: mx.array, gain: mx.array) -> bool:
    """Whether these are many rows that a kernel for NVIDIA GPUs takes."""
    return x.shape[0] > LONGEST and device.cuda() is not None and sum_norm.takes(x, branch, gain)


def graph(x: mx.array, gain: mx.array | None, eps: float) -> mx.array:
    """Plain MLX; its kernel would return the gain's dtype when that is wider."""
    if gain is None or gain.dtype == x.dtype:
        return mx.fast.rms_norm(x, gain, eps)
    return mx.fast.rms_norm(x.astype(mx.float32), gain.astype(mx.float32), eps).astype(x.dtype)
