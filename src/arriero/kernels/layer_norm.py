"""Normalisation by mean and variance over the last axis."""

from __future__ import annotations

import mlx.core as mx

from arriero.kernels import device
from arriero.kernels.rms_norm import rms_norm


def layer_norm(x: mx.array, gain: mx.array, eps: float) -> mx.array:
    """`(x − mean) / sqrt(variance + eps) · gain`, computed in float32; the result has x's dtype.

    Source: Ba, Kiros and Hinton, 2016.
    """
    if device.native() is None:
        return graph(x, gain, eps)
    # The variance is the mean square of what the mean was taken from: half the operations, and one rounding.
    wide = x.astype(mx.float32)
    return rms_norm(wide - wide.mean(axis=-1, keepdims=True), gain, eps).astype(x.dtype)


def graph(x: mx.array, gain: mx.array, eps: float) -> mx.array:
    """Plain MLX: one operation on a GPU, fifteen on the CPU."""
    return mx.fast.layer_norm(x, gain, None, eps)
