"""Rotary position embedding of packed heads, by a table of angles."""

from __future__ import annotations

import mlx.core as mx

from arriero.kernels import device
from arriero.kernels.cuda import prompt_heads as cuda
from arriero.kernels.cuda.attention import LONGEST
from arriero.kernels.metal import heads as metal
from arriero.kernels.metal.product import Norm
from arriero.kernels.rms_norm import rms_norm


def rope(x: mx.array, table: mx.array, *, interleaved: bool = False) -> mx.array:
    """Rotate the first R elements of each head of x `[T, heads, D]`; the result has x's dtype.

    `table` is float32 `[T, R / 2, 2]`: cosine and sine of each token's angles, magnitude included. Pairs are
    `(i, i + R/2)`, or `(2i, 2i + 1)` when `interleaved`. Source: Su et al., RoFormer, 2021.
    """
    native = device.native()
    if native is not None:
        return native.rope(x, table, interleaved=interleaved)
    if device.metal() and metal.takes(x, None, table):
        return metal.turned(x, None, table, interleaved=interleaved)
    if _on_cuda(x, None, table, interleaved):
        return cuda.turned(x, None, table, interleaved=interleaved)
    return graph(x, table, interleaved=interleaved)


def normed_rope(x: mx.array, norm: Norm | None, table: mx.array | None, *, interleaved: bool = False) -> mx.array:
    """`rope` of the `rms_norm` of heads x `[T, heads, D]`; either may be missing."""
    if device.metal() and metal.takes(x, norm, table):
        return metal.turned(x, norm, table, interleaved=interleaved)
    if norm is not None and _on_cuda(x, norm, table, interleaved):
        return cuda.turned(x, norm, table, interleaved=interleaved)
    if norm is not None:
        x = rms_norm(x, *norm)
    return x if table is None else rope(x, table, interleaved=interleaved)


def _on_cuda(x: mx.array, norm: Norm | None, table: mx.array | None, interleaved: bool) -> bool:
    """Whether these are heads of many tokens that a kernel for NVIDIA GPUs takes."""
    many = x.shape[0] > LONGEST and device.cuda() is not None
    return many and cuda.turns(x, table, norm, interleaved=interleaved)


def graph(x: mx.array, table: mx.array, *, interleaved: bool = False) -> mx.array:
    """Plain MLX, in float32."""
    half = table.shape[1]
    cos, sin = table[:, None, :, 0], table[:, None, :, 1]
    rotated = x[..., : 2 * half].astype(mx.float32)
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    else:
        first, second = rotated[..., :half], rotated[..., half:]
    parts = [first * cos - second * sin, second * cos + first * sin]
    if interleaved:
        y = mx.stack(parts, axis=-1).reshape(rotated.shape)
    else:
        y = mx.concatenate(parts, axis=-1)
    y = y.astype(x.dtype)
    return y if 2 * half == x.shape[-1] else mx.concatenate([y, x[..., 2 * half :]], axis=-1)
