"""MXFP4 and MXFP8: E2M1 or E4M3 codes in groups of 32 under a power of two."""

from __future__ import annotations

import numpy as np

from arriero.formats.affine import unpack
from arriero.formats.codes import E2M1, E4M3, E8M0

GROUP = 32


def dequantize(packed: np.ndarray, scales: np.ndarray, bits: int) -> np.ndarray:
    """Float32 `[..., n]` of words uint32 `[..., n · bits / 32]` and E8M0 codes uint8 `[..., n / 32]`; bits 4 or 8."""
    table = {4: E2M1, 8: E4M3}[bits]
    codes = unpack(packed, bits)
    with np.errstate(over="ignore"):  # a value beyond float32 is infinite, as MLX has it
        groups = table[codes].reshape(*codes.shape[:-1], -1, GROUP) * E8M0[scales][..., None]
    values: np.ndarray = groups.reshape(codes.shape)
    return values
