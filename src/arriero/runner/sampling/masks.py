"""Scores of tokens that may not be drawn, ruled out."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx
import numpy as np

_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(bool)
# Of each byte of eight tokens: what their scores may be at most. NumPy has no bfloat16, so that is its bits.
_LIMITS: Mapping[mx.Dtype, np.ndarray] = {
    mx.float32: np.where(_BITS, np.inf, -np.inf).astype(np.float32),
    mx.float16: np.where(_BITS, np.inf, -np.inf).astype(np.float16),
    mx.bfloat16: np.where(_BITS, 0x7F80, 0xFF80).astype(np.uint16),
}


def ruled_out(scores: mx.array, allowed: np.ndarray) -> mx.array:
    """Scores `[n, vocab]` with those of tokens that are not `allowed`, bool `[n, vocab]`, at minus infinity.

    On the CPU a choice between two values costs a guess of the processor for every token, and the minimum with a limit
    does not: for a quarter of a million tokens 0.09 ms instead of 0.13 to 0.65, as the guesses go.
    """
    table = _LIMITS.get(scores.dtype)
    if table is None or mx.default_device() != mx.Device(mx.cpu):
        return mx.where(mx.array(allowed), scores, mx.array(-mx.inf, scores.dtype))
    packed = np.packbits(allowed, axis=-1, bitorder="little")
    limits = np.take(table, packed, axis=0).reshape(len(packed), -1)[:, : allowed.shape[-1]]
    return mx.minimum(scores, mx.array(limits).view(scores.dtype))
