"""FP8 weights as dense numbers: MLX multiplies by no layout of their kind."""

from __future__ import annotations

import mlx.core as mx

from arriero.formats.blockfp8 import BLOCK


def decode_fp8(codes: mx.array, scales: mx.array) -> mx.array:
    """Float32 `[..., rows, columns]` of E4M3 codes uint8 and scales by 128 × 128 block, by row, or one for all.

    Lazy, so that who takes it in a narrower type rounds once and never holds the wide numbers.
    """
    values = mx.from_fp8(codes, mx.float32)
    scales = scales.astype(mx.float32)
    if scales.size == 1 or scales.shape == (*codes.shape[:-1], 1):
        return values * scales
    *lead, rows, columns = codes.shape
    down, across = scales.shape[-2:]
    edges = [(0, 0)] * len(lead) + [(0, down * BLOCK - rows), (0, across * BLOCK - columns)]
    blocks = mx.pad(values, edges).reshape(*lead, down, BLOCK, across, BLOCK)
    whole = blocks * scales[..., :, None, :, None]
    return whole.reshape(*lead, down * BLOCK, across * BLOCK)[..., :rows, :columns]
