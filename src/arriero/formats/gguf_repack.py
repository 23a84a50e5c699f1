"""GGUF blocks → MLX's packed layouts, exactly where a layout allows it.

Types with groups of 32 are relabelled without touching a code. Those with groups of 16 (Q2_K, Q3_K, Q6_K) have no
equal among MLX's layouts (groups of 32 and more), so two groups share a finer common step. Codebook types go to 8 bits.
docs/formats.md has the measured errors.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from arriero.formats import affine
from arriero.formats.gguf_blocks import AFFINE_TYPES, FLOAT_TYPES, PACKAGE_TYPES, Groups, decode, float_groups, groups
from arriero.formats.gguf_types import BlockType

CHUNK = 1 << 18
"""Values that a thread decodes at a time: temporary arrays stay around a megabyte each, in the processor's caches."""
THREADS = 8


@dataclass(frozen=True, slots=True)
class Layout:
    """The packed layout that a block type becomes; `exact` when every value survives."""

    mode: str
    bits: int
    group_size: int
    exact: bool


@dataclass(frozen=True, slots=True)
class Packed:
    """`data` uint32 `[rows, words]`; `scales` (and `biases` of affine) `[rows, groups]` in float16, float32, E8M0 or
    E4M3 codes."""

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
    "MXFP4_PAIRS": Layout("mxfp4", 4, 32, True),
    "NVFP4": Layout("nvfp4", 4, 16, True),
    "Q6_K": Layout("affine", 8, 32, False),
    "Q3_K": Layout("affine", 6, 32, False),
    "Q2_K": Layout("affine", 6, 32, False),
} | {name: Layout("affine", 8, 32, False) for name in PACKAGE_TYPES}

_HALF = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL"}
"""Types whose scales are float16 in the file and stay so unless an offset does not fit."""


def repackable(block_type: BlockType) -> bool:
    """Whether `repack` knows the type."""
    return block_type.name in LAYOUTS


def repack(block_type: BlockType, raw: np.ndarray) -> Packed:
    """Bytes uint8 `[rows, bytes of a row]` → the packed layout of `LAYOUTS`, some rows at a time on a few threads.

    Scales and biases are float16 where the file's are and the bias fits exactly, else float32. Raises CheckpointError
    for a scale that is no finite number.
    """
    layout = LAYOUTS[block_type.name]
    rows, columns = len(raw), raw.shape[1] // block_type.nbytes * block_type.block
    data = np.empty((rows, columns * layout.bits // 32), "<u4")
    scales, biases = (np.empty((rows, columns // layout.group_size), np.float32) for _ in range(2))
    floats = np.empty(scales.shape, np.uint8) if block_type.name in FLOAT_TYPES else None

    def some_rows(start: int) -> None:
        part = slice(start, start + step)
        if floats is not None:
            floats[part], codes = float_groups(block_type, raw[part])
        else:
            found = _layout_groups(block_type, raw[part], layout.bits)
            codes, scales[part], biases[part] = found.codes, found.scales, found.offsets
        data[part] = affine.pack(codes.reshape(len(codes), columns), layout.bits)

    step = max(1, CHUNK // columns)
    if rows <= step:
        some_rows(0)
    else:
        with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
            list(pool.map(some_rows, range(0, rows, step)))
    if floats is not None:
        return Packed(data, floats, None, layout)
    if block_type.name in _HALF and _fits_half(biases):
        return Packed(data, scales.astype(np.float16), biases.astype(np.float16), layout)
    return Packed(data, scales, biases, layout)


def _layout_groups(block_type: BlockType, raw: np.ndarray, bits: int) -> Groups:
    if block_type.name not in AFFINE_TYPES:
        codes, scales, biases = affine.quantize(decode(block_type, raw), 32, bits)
        return Groups(codes.reshape(len(raw), -1, 32), scales, biases)
    found = groups(block_type, raw)
    if block_type.name == "Q2_K":
        return _shared_range(found, bits)
    own_bits = {"Q3_K": 3, "Q6_K": 6}.get(block_type.name)
    return found if own_bits is None else _shared_step(found, own_bits, bits)


def _fits_half(offsets: np.ndarray) -> bool:
    with np.errstate(over="ignore"):
        return bool((offsets.astype(np.float16) == offsets).all())


def _on_grid(found: Groups, steps: np.ndarray, first: np.ndarray, bits: int) -> Groups:
    """Pairs of groups on the grid `(first + code) · step`, one step and first code per pair."""
    rows = len(found.codes)
    slopes = found.scales.reshape(rows, -1, 2) / steps[..., None]
    shifts = found.offsets.reshape(rows, -1, 2) / steps[..., None] - first[..., None]
    values = found.codes.reshape(rows, -1, 2, 16).astype(np.float32)
    values *= slopes[..., None]
    values += shifts[..., None]
    np.rint(values, out=values)
    np.clip(values, 0, (1 << bits) - 1, out=values)
    return Groups(values.astype(np.uint8).reshape(rows, -1, 32), steps, first * steps)


def _shared_step(found: Groups, own_bits: int, bits: int) -> Groups:
    """Two symmetric groups on the grid of the coarser one, refined by the bits to spare.

    The coarser group keeps its values; the finer one is off by half a step of the grid (a whole one at the very edge,
    when the signs of the scales differ). The step has the sign of the coarser scale, so that the middle code stands for
    zero in every group: a matrix whose offsets are all the same number of scales need not keep them.
    """
    scales = found.scales.reshape(len(found.codes), -1, 2)
    sizes = np.abs(scales)
    coarse = np.where(sizes[..., 0] >= sizes[..., 1], scales[..., 0], scales[..., 1])
    first = np.full_like(coarse, -(1 << bits - 1))
    steps = np.where(coarse == 0, np.float32(1), coarse * np.float32(2.0 ** (own_bits - bits)))
    return _on_grid(found, steps, first, bits)


def _shared_range(found: Groups, bits: int) -> Groups:
    """Two groups of 2-bit codes over their common range."""
    rows = len(found.codes)
    ends = np.stack([found.offsets, found.offsets + 3 * found.scales], axis=-1).reshape(rows, -1, 4)
    low, high = ends.min(axis=-1), ends.max(axis=-1)
    steps = (high - low) / np.float32((1 << bits) - 1)
    steps = np.where(steps > 0, steps, np.float32(1))
    return _on_grid(found, steps, low / steps, bits)
