"""What the towers share: pixels as numbers, norms, attention without an order, rows put in the place of tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import mlx.core as mx
import numpy as np

from arriero.errors import CheckpointError, InvalidRequest
from arriero.image import ImagePatches
from arriero.kernels.attention import SCORE_BUDGET, attention
from arriero.kernels.device import fused, on_cpu
from arriero.model.checkpoint import Checkpoint
from arriero.model.layers.linear import expect_shape

CHANNELS = 3
LARGE = 2048
"""Patches of an image that is computed layer by layer."""
FUSED_WIDTHS = (64, 80, 128)
"""Widths of 16-bit heads for which GPUs have kernels that keep no scores in memory; others are filled up with zeros."""


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """`(x − mean) / deviation · gain + bias` over the last axis; the result has x's dtype."""

    gain: mx.array
    bias: mx.array
    eps: float

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, *, eps: float, width: int) -> Self:
        """`prefix.weight` and `prefix.bias`, both `[width]`."""
        gain, bias = (checkpoint.tensor(f"{prefix}.{name}").astype(dtype) for name in ("weight", "bias"))
        for name, vector in (("weight", gain), ("bias", bias)):
            expect_shape(f"{prefix}.{name}", tuple(vector.shape), (width,))
        return cls(gain, bias, eps)

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.layer_norm(x, self.gain, self.bias, self.eps)


def find_tower(checkpoint: Checkpoint, name: str, roots: Sequence[str]) -> str:
    """The prefix of a tower's tensors, one of which is `name`; CheckpointError when it is under none of `roots`."""
    for root in roots:
        if f"{root}{name}" in checkpoint:
            return root
    raise CheckpointError(
        f"the checkpoint has a vision tower, but no {' or '.join(f'{root}{name}' for root in roots)}: it is incomplete"
    )


@fused
def gelu(x: mx.array, *, tanh: bool) -> mx.array:
    """The activation in its tanh form or its exact form by erf, computed in float32; the result has x's dtype."""
    v = x.astype(mx.float32)
    if tanh:
        inner = mx.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v * v * v))
    else:
        inner = mx.erf(v * math.sqrt(0.5))
    return (0.5 * v * (1 + inner)).astype(x.dtype)


def check_patches(patches: ImagePatches, values: int) -> None:
    """InvalidRequest unless the pixels are `rows · columns` patches of so many values."""
    expected = patches.rows * patches.columns * values
    if len(patches.pixels) != expected:
        raise InvalidRequest(
            f"an image of {patches.rows} × {patches.columns} patches has {len(patches.pixels)} values, "
            f"but this model takes {expected}"
        )


def pixel_rows(patches: ImagePatches, order: Literal["channels first", "channels last"]) -> mx.array:
    """The values as the tower was trained on them, float32 `[patches, values]`, in the order that they have."""
    first = order == "channels first"
    count = patches.rows * patches.columns
    raw = np.frombuffer(patches.pixels, np.uint8).reshape((count, CHANNELS, -1) if first else (count, -1, CHANNELS))
    shape = (CHANNELS, 1) if first else (CHANNELS,)
    mean, deviation = (mx.array(values, mx.float32).reshape(shape) for values in (patches.mean, patches.deviation))
    return ((mx.array(raw).astype(mx.float32) * (1 / 255) - mean) / deviation).reshape(count, -1)


def settle(x: mx.array) -> mx.array:
    """A large image's state `[patches, hidden]`, computed now.

    A lazy tower has the buffers of all its layers allocated at once on a GPU: 12 GB for 4096 patches of width 1152 in
    16 bits, where layer by layer takes 0.7 GB.
    """
    if x.shape[0] > LARGE:
        mx.eval(x)
    return x


def mutual_attention(q: mx.array, k: mx.array, v: mx.array, *, scale: float) -> mx.array:
    """Attention of n patches that all see each other: q `[n, heads, D]`, k and v `[n, kv_heads, D]` to q's shape."""
    count, heads, size = q.shape
    if on_cpu():
        return _attend(q, k, v, 0, scale)
    width = next((width for width in FUSED_WIDTHS if size <= width), size)
    if width > size:
        q, k, v = (mx.pad(x, [(0, 0), (0, 0), (0, width - size)]) for x in (q, k, v))
    whole = width in FUSED_WIDTHS and q.dtype != mx.float32
    block = count if whole else max(64, SCORE_BUDGET // (count * heads))
    parts = [_attend(q[start : start + block], k, v, start, scale) for start in range(0, count, block)]
    y = parts[0] if len(parts) == 1 else mx.concatenate(parts)
    return y if width == size else y[..., :size]


def _attend(q: mx.array, k: mx.array, v: mx.array, start: int, scale: float) -> mx.array:
    """Some of the queries, from the patch `start` on, over all keys."""
    return attention(
        q,
        [k[None].swapaxes(1, 2)],
        [v[None].swapaxes(1, 2)],
        scale=scale,
        lengths=[q.shape[0]],
        positions=[start],
        causal=False,
    )
