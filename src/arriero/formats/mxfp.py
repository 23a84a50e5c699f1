"""MXFP4 and MXFP8: E2M1 or E4M3 codes in groups of 32 under a power of two."""

from __future__ import annotations

import numpy as np

from arriero.formats.affine import unpack
from arriero.formats.codes import E2M1, E4M3, E8M0
from arriero.formats.small_float import E2M1_FLOAT, E4M3_FLOAT, SmallFloat

GROUP = 32


def dequantize(packed: np.ndarray, scales: np.ndarray, bits: int) -> np.ndarray:
    """Float32 `[..., n]` of words uint32 `[..., n · bits / 32]` and E8M0 codes uint8 `[..., n / 32]`; bits 4 or 8."""
    table = {4: E2M1, 8: E4M3}[bits]
    codes = unpack(packed, bits)
    with np.errstate(over="ignore"):  # a value beyond float32 is infinite, as MLX has it
        groups = table[codes].reshape(*codes.shape[:-1], -1, GROUP) * E8M0[scales][..., None]
    values: np.ndarray = groups.reshape(codes.shape)
    return values


def quantize(values: np.ndarray, bits: int, *, search: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Codes uint8 `[..., n]` and E8M0 scale codes uint8 `[..., n / 32]` of finite float32 values; bits 4 or 8.

    The scale is the smallest power of two that clips nothing; with `search`, half of it where clipping the largest
    values costs less squared error than the finer steps save.
    """
    kind = {4: E2M1_FLOAT, 8: E4M3_FLOAT}[bits]
    groups = values.reshape(*values.shape[:-1], -1, GROUP).astype(np.float32)
    largest = np.abs(groups).max(axis=-1)
    # frexp: largest / limit = m · 2**e with m in [0.5, 1), so the ceiling of its logarithm is e, or e - 1 at m = 0.5.
    mantissa, exponent = np.frexp(largest.astype(np.float64) / kind.largest)
    exponent = np.where(mantissa == 0.5, exponent - 1, exponent)
    codes = np.where(largest > 0, np.clip(exponent + 127, 0, 254), 127).astype(np.uint8)
    if search:
        lower = np.maximum(codes, 1) - 1
        better = _error(groups, kind, lower) < _error(groups, kind, codes)
        codes = np.where(better & (largest > 0), lower, codes).astype(np.uint8)
    scaled = groups / E8M0[codes][..., None]
    return kind.encode(kind.nearest(scaled), groups).reshape(values.shape), codes


def _error(groups: np.ndarray, kind: SmallFloat, codes: np.ndarray) -> np.ndarray:
    """Squared error of each group under one scale."""
    scales = E8M0[codes][..., None]
    miss = kind.nearest(groups / scales)
    miss *= scales
    miss -= groups
    squares: np.ndarray = np.einsum("...i,...i->...", miss, miss)
    return squares
