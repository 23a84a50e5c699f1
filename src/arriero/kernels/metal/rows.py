"""Rows of a packed table, decoded in one launch."""

from __future__ import annotations

import mlx.core as mx

from arriero.kernels.metal.product import FORMATS
from arriero.kernels.metal.source import TYPES, Launch, kernel, on_device

CODES = ("e4m3", 8, 0)
"""Eight-bit floats without scales, four in a word."""
DECODED = {**FORMATS, CODES: FORMATS["mxfp8", 8, 32]}
THREADS = 256
"""Of a threadgroup, at most."""


def takes(ids: mx.array, dtype: mx.Dtype, *, mode: str, bits: int, group_size: int, width: int) -> bool:
    """Whether the kernel decodes this: rows of `width` values to `dtype`."""
    return (
        (mode, bits, group_size) in DECODED
        and dtype in TYPES
        and ids.dtype in (mx.int32, mx.uint32)
        and ids.size > 0
        and width > 0
        and width % 8 == 0
    )


def take(
    w: mx.array,
    scales: mx.array | None,
    biases: mx.array | None,
    ids: mx.array,
    *,
    mode: str,
    bits: int,
    group_size: int,
    dtype: mx.Dtype,
    factors: mx.array | None = None,
    launch: Launch | None = None,
) -> mx.array:
    """Rows `ids` `[n]` of a table `[rows, width · bits / 32]` uint32, as `[n, width]` of `dtype`.

    `factors`, float32, holds one number or one for each row of the table, and meets the values in float32.
    """
    width = w.shape[1] * 32 // bits
    made = (launch or kernel("rows"))(
        inputs=[
            w,
            w if scales is None else scales,
            w if biases is None else biases,
            on_device(ids, 0),
            w if factors is None else factors.reshape(-1),
            mx.array([width], mx.int32),
        ],
        template=[
            ("O", dtype),
            ("I", ids.dtype),
            ("FORMAT", DECODED[mode, bits, group_size]),
            ("BITS", bits),
            ("GROUP", group_size),
            ("FACTOR", 0 if factors is None else 1 if factors.size == 1 else 2),
        ],
        grid=(width // 8, ids.size, 1),
        threadgroup=(min(width // 8, THREADS), 1, 1),
        output_shapes=[(ids.size, width)],
        output_dtypes=[dtype],
    )
    return made[0]
