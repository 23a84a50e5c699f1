"""GGUF blocks → MLX's packed layouts, exactly where a layout allows it.

Types with groups of 32 are relabelled without touching a code. Those with groups of 16 (Q2_K, Q3_K, Q6_K) have no
equal among MLX's layouts (groups of 32 and more), so two groups share a finer common step; docs/formats.md has the
measured errors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from arriero.formats import affine
from arriero.formats.gguf_blocks import Groups, groups, mxfp4_groups, supported
from arriero.formats.gguf_types import BlockType

CHUNK = 1 << 22
"""Values decoded at a time: temporary arrays stay below some tens of megabytes."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The packed layout that a block type becomes; `exact` when every value survives."""

    mode: str
    bits: int
    group_size: int
    exact: bool


@dataclass(frozen=True, slots=True)
class Packed:
    """`data` uint32 `[rows, words]`; `scales` (and `biases` of affine) `[rows, groups]` in float16, float32 or E8M0."""

    data: np.ndarray
    scales: np.ndarray
    biases: np.ndarray | None
    layout: Layout


LAYOUTS: dict[str, Layout] = {
    "Q4_0": Layout("affine", 4, 32, True),
    "Q4_1": Layout("affine", 4, 32, True),
    "Q5_0": Layout("affine", 5, 32, True),
    "Q5_1": Layout("affine", 5, 32, True),
    "Q8_0": Layout("affine", 8, 32, True),
    "Q4_K": Layout("affine", 4, 32, True),
    "Q5_K": Layout("affine", 5, 32, True),
    "IQ4_NL": Layout("affine", 8, 32, True),
    "IQ4_XS": Layout("affine", 8, 32, True),
    "MXFP4": Layout("mxfp4", 4, 32, True),
    "Q6_K": Layout("affine", 8, 32, False),
    "Q3_K": Layout("affine", 6, 32, False),
    "Q2_K": Layout("affine", 6, 32, False),
}

_HALF = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL"}
"""Types whose scales are float16 in the file and stay so unless an offset does not fit."""


def repackable(block_type: BlockType) -> bool:
    """Whether `repack` knows the type."""
    return block_type.name in LAYOUTS and supported(block_type)


def repack(block_type: BlockType, raw: np.ndarray) -> Packed:
    """Bytes uint8 `[rows, bytes of a row]` → the packed layout of `LAYOUTS`, some rows at a time.

    Scales and biases keep float16 where that is exact for the whole tensor, else they are float32. Raises
    CheckpointError for a scale that is no finite number.
    """
    layout = LAYOUTS[block_type.name]
    rows, columns = len(raw), raw.shape[1] // block_type.nbytes * block_type.block
    data = np.empty((rows, columns * layout.bits // 32), "<u4")
    shape = (rows, columns // layout.group_size)
    step = max(1, CHUNK // columns)
    if layout.mode == "mxfp4":
        exponents = np.empty(shape, np.uint8)
        for start in range(0, rows, step):
            part = slice(start, start + step)
            exponents[part], codes = mxfp4_groups(raw[part])
            data[part] = affine.pack(codes.reshape(len(codes), columns), 4)
        return Packed(data, exponents, None, layout)
    scales, biases = (np.empty(shape, np.float16 if block_type.name in _HALF else np.float32) for _ in range(2))
    for start in range(0, rows, step):
        part = slice(start, start + step)
        found = groups(block_type, raw[part])
        if not layout.exact:
            found = _shared_range(found, layout.bits) if block_type.name == "Q2_K" else _shared_step(found, layout.bits)
        if scales.dtype == np.float16 and not _fits_half(found.offsets):
            scales, biases = scales.astype(np.float32), biases.astype(np.float32)
        data[part] = affine.pack(found.codes.reshape(len(found.codes), columns), layout.bits)
        scales[part], biases[part] = found.scales, found.offsets
    return Packed(data, scales, biases, layout)


def _fits_half(offsets: np.ndarray) -> bool:
    with np.errstate(over="ignore"):
        return bool((offsets.astype(np.float16) == offsets).all())


def _paired(found: Groups) -> np.ndarray:
    """Values of neighbouring groups of 16 side by side, float32 `[rows, pairs, 32]`."""
    return found.values().reshape(len(found.codes), -1, 32)


def _shared_step(found: Groups, bits: int) -> Groups:
    """Two groups on the grid of the coarser one, refined by the power of two that the codes have room for.

    The coarser group keeps its values; the finer one is off by at most half a step of the grid.
    """
    values = _paired(found)
    coarse = np.abs(found.scales).reshape(len(values), -1, 2).max(axis=-1)
    coarse[coarse == 0] = 1
    low, high = values.min(axis=-1), values.max(axis=-1)
    room = np.float32((1 << bits) - 2)
    spread = np.maximum(high - low, coarse)
    steps = np.ldexp(coarse, np.floor(np.log2(room * (coarse / spread))).astype(np.int32) * -1)
    first = np.rint(low / steps)
    codes = np.rint(values / steps[..., None]) - first[..., None]
    return Groups(codes.clip(0, (1 << bits) - 1).astype(np.uint8), steps, first * steps)


def _shared_range(found: Groups, bits: int) -> Groups:
    """Two groups over their common range."""
    codes, scales, biases = affine.quantize(_paired(found), 32, bits)
    return Groups(codes, scales[..., 0], biases[..., 0])
