"""Keys and values that tell their position."""

from __future__ import annotations

import mlx.core as mx
import numpy as np


def numbered(start: int, count: int, first: float = 0.0) -> tuple[mx.array, mx.array]:
    """Keys and values `[1, 1, count, 2]` that tell their position and the conversation `first`."""
    column = mx.arange(start, start + count, dtype=mx.float32)[None, None, :, None] + first
    return mx.broadcast_to(column, (1, 1, count, 2)), mx.broadcast_to(-column, (1, 1, count, 2))


def column(keys: mx.array) -> list[float]:
    return np.array(keys)[0, 0, :, 0].tolist()


def positions(start: int, end: int) -> list[float]:
    return [float(p) for p in range(start, end)]
