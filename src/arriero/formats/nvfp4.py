"""NVFP4: E2M1 codes in groups of 16 under an E4M3 scale, and one float32 multiplier per tensor or expert."""

from __future__ import annotations

import numpy as np

from arriero.formats.affine import unpack
from arriero.formats.codes import E2M1, E4M3

GROUP = 16
LARGEST = 6 * 448
"""A global scale stated as the tensor's largest value (MLX) is the multiplier times this."""


def dequantize(packed: np.ndarray, scales: np.ndarray, multiplier: float = 1.0) -> np.ndarray:
    """Float32 `[..., n]` of words uint32 `[..., n / 8]` and E4M3 codes uint8 `[..., n / 16]`."""
    codes = unpack(packed, 4)
    groups = E2M1[codes].reshape(*codes.shape[:-1], -1, GROUP) * E4M3[scales][..., None]
    values: np.ndarray = (groups * np.float32(multiplier)).reshape(codes.shape)
    return values
