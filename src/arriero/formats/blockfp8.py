"""FP8 weights of Hugging Face models: E4M3 codes under a float scale for each block of 128 by 128, row, or tensor."""

from __future__ import annotations

import numpy as np

from arriero.formats.codes import E4M3

BLOCK = 128


def scale_fits(shape: tuple[int, ...], scale: tuple[int, ...]) -> bool:
    """Whether scales of one shape belong to codes `[..., rows, columns]`: by block, by row, or one for all."""
    if scale in ((), (1,)):
        return True
    *lead, rows, columns = shape
    return scale in ((*lead, -(-rows // BLOCK), -(-columns // BLOCK)), (*lead, rows, 1))


def dequantize(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Float32 `[..., rows, columns]` of codes uint8 and their scales; ValueError when the shapes don't fit."""
    if not scale_fits(codes.shape, scales.shape):
        raise ValueError(f"scales of shape {scales.shape} do not fit codes of shape {codes.shape}")
    scales = scales.astype(np.float32)
    if scales.shape not in ((), (1,)) and scales.shape != (*codes.shape[:-1], 1):
        rows, columns = codes.shape[-2:]
        scales = scales.repeat(BLOCK, axis=-2)[..., :rows, :].repeat(BLOCK, axis=-1)[..., :columns]
    values: np.ndarray = E4M3[codes] * scales
    return values
