"""NVFP4: E2M1 codes in groups of 16 under an E4M3 scale, and one float32 multiplier per tensor or expert."""

from __future__ import annotations

import numpy as np

from arriero.formats.affine import unpack
from arriero.formats.codes import E2M1, E4M3
from arriero.formats.small_float import E2M1_FLOAT, E4M3_FLOAT

GROUP = 16
LARGEST = 6 * 448
"""A global scale stated as the tensor's largest value (MLX) is the multiplier times this."""


def dequantize(packed: np.ndarray, scales: np.ndarray, multiplier: float = 1.0) -> np.ndarray:
    """Float32 `[..., n]` of words uint32 `[..., n / 8]` and E4M3 codes uint8 `[..., n / 16]`."""
    codes = unpack(packed, 4)
    groups = E2M1[codes].reshape(*codes.shape[:-1], -1, GROUP) * E4M3[scales][..., None]
    values: np.ndarray = (groups * np.float32(multiplier)).reshape(codes.shape)
    return values


SEARCHED = (-1, 1, 2, 3, 4, 5)
"""Steps of a scale's code that are tried: 5 steps up, the largest value lies on 4 instead of 6."""


def multiplier_for(largest: float) -> float:
    """The float32 multiplier of a tensor by its largest magnitude, so that its largest scale is E4M3's largest."""
    return float(np.float32(largest) / np.float32(LARGEST)) or 1.0


def quantize(values: np.ndarray, multiplier: float, *, search: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Codes uint8 `[..., n]` and E4M3 scale codes uint8 `[..., n / 16]` of finite float32 values.

    The scale is a group's largest magnitude over 6, rounded; with `search`, the one of its neighbours (`SEARCHED`)
    with the least squared error.
    """
    groups = values.reshape(*values.shape[:-1], -1, GROUP).astype(np.float32)
    groups = groups / np.float32(multiplier)
    wanted = np.abs(groups).max(axis=-1) / np.float32(6)
    rounded = E4M3_FLOAT.nearest(wanted)
    first = E4M3_FLOAT.encode(rounded, rounded)
    best = first
    if search:
        least = _error(groups, first)
        for step in SEARCHED:
            tried = np.clip(first.astype(np.int16) + step, 1, 0x7E).astype(np.uint8)
            error = _error(groups, tried)
            better = error < least
            best, least = np.where(better, tried, best), np.where(better, error, least)
    scales = E4M3[best]
    scaled = groups / np.where(scales > 0, scales, np.float32(1))[..., None]
    nearest = np.where(scales[..., None] > 0, E2M1_FLOAT.nearest(scaled), np.float32(0))
    return E2M1_FLOAT.encode(nearest, groups).reshape(values.shape), best


def _error(groups: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Squared error of each group under one scale, in units of the multiplier."""
    scales = E4M3[codes][..., None]
    miss = E2M1_FLOAT.nearest(groups / np.where(scales > 0, scales, np.float32(1)))
    miss *= scales
    miss -= groups
    squares: np.ndarray = np.einsum("...i,...i->...", miss, miss)
    return squares
