"""Products of a few rows with a quantised matrix in MLX's layout."""

from __future__ import annotations

import mlx.core as mx

from arriero.kernels.metal.source import TYPES, Launch, kernel

FORMATS = {
    **{("affine", bits, group): 0 for bits in (4, 8) for group in (32, 64, 128)},
    ("mxfp4", 4, 32): 1,
    ("mxfp8", 8, 32): 2,
    ("nvfp4", 4, 16): 3,
}
MOST_ROWS = 16
"""Rows from which decoding a matrix first, as plain MLX does in its products of many rows, is the better way."""
TILES = (1, 2, 4, 8)
"""Rows that a lane keeps at once: it holds eight numbers of each."""
COLUMNS = 4
"""Columns of a simdgroup."""
SIMDGROUPS = 2


def takes(x: mx.array, *, mode: str, bits: int, group_size: int) -> bool:
    """Whether the kernel has this product of x `[..., in]`."""
    width = x.shape[-1]
    return x.dtype in TYPES and (mode, bits, group_size) in FORMATS and 0 < x.size <= MOST_ROWS * width


def multiply(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    *,
    mode: str,
    bits: int,
    group_size: int,
    global_scale: mx.array | None = None,
    launch: Launch | None = None,
) -> mx.array:
    """`kernels/quantized_matmul.py` for x `[..., in]` of at most MOST_ROWS rows; sums are float32."""
    columns, depth = w.shape[0], x.shape[-1]
    rows = x.size // depth
    tile = min((size for size in TILES if size >= rows), default=TILES[-1])
    factor = 0 if global_scale is None else 1 if global_scale.size == 1 else 2
    one = mx.ones((1,)) if global_scale is None else global_scale.reshape(-1).astype(mx.float32)
    made = (launch or kernel("product"))(
        inputs=[
            x.reshape(rows, depth),
            w,
            scales,
            scales if biases is None else biases,
            one,
            mx.array([rows, columns, depth], mx.int32),
        ],
        template=[
            ("T", x.dtype),
            ("FORMAT", FORMATS[mode, bits, group_size]),
            ("BITS", bits),
            ("GROUP", group_size),
            ("FACTOR", factor),
            ("ROWS", tile),
            ("OUT", COLUMNS),
            ("NSG", SIMDGROUPS),
        ],
        grid=(32 * SIMDGROUPS, -(-columns // (COLUMNS * SIMDGROUPS)), -(-rows // tile)),
        threadgroup=(32 * SIMDGROUPS, 1, 1),
        output_shapes=[(*x.shape[:-1], columns)],
        output_dtypes=[x.dtype],
    )
    return made[0]
