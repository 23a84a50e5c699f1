"""Heads normed and rotated in one launch."""

from __future__ import annotations

import mlx.core as mx

from arriero.kernels.metal.product import Norm
from arriero.kernels.metal.source import LEAST_DEVICE_VALUES, TYPES, Launch, kernel, on_device

SIMDGROUPS = 8
"""Heads of a threadgroup, at most."""


def takes(x: mx.array, norm: Norm | None, table: mx.array | None) -> bool:
    """Whether the kernel has heads x `[T, heads, D]` with this gain and these angles, of which one may be missing."""
    return (
        x.ndim == 3
        and x.dtype in TYPES
        and x.size > 0
        and (norm is None or norm[0].dtype in TYPES)
        and (table is None or (table.dtype == mx.float32 and table.shape[0] == x.shape[0]))
        and not (norm is None and table is None)
    )


def turned(
    x: mx.array, norm: Norm | None, table: mx.array | None, *, interleaved: bool = False, launch: Launch | None = None
) -> mx.array:
    """x `[T, heads, D]` through `kernels/rms_norm.py`, then `kernels/rope.py`; the result is rounded once."""
    tokens, heads, width = x.shape
    missing = mx.array([0.0] * LEAST_DEVICE_VALUES)
    made = (launch or kernel("heads"))(
        inputs=[
            x,
            missing if norm is None else on_device(mx.contiguous(norm[0]), 0),
            missing if table is None else on_device(mx.contiguous(table).reshape(-1), 0),
            mx.array([0.0 if norm is None else norm[1]], mx.float32),
        ],
        template=[
            ("T", x.dtype),
            ("G", mx.float32 if norm is None else norm[0].dtype),
            ("D", width),
            ("NORM", norm is not None),
            ("TURNED", 0 if table is None else 2 * table.shape[1]),
            ("INTERLEAVED", interleaved),
        ],
        grid=(32, heads, tokens),
        threadgroup=(32, min(heads, SIMDGROUPS), 1),
        output_shapes=[x.shape],
        output_dtypes=[x.dtype],
    )
    return made[0]
