"""Products of one row with matrices in NVFP4 whose weights pass through shared memory, ahead of their decoding."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from arriero.kernels.cuda.formats import FORMATS, Format
from arriero.kernels.cuda.gpu import Gpu

WARPS = 16
TILE = 16
"""Rows of W in one tile."""
PIECE = 2304
"""Bytes of two units of a tile, with their scales."""
LEAST, MOST = 4, 5
"""Pieces of each warp that are on their way or there."""
FORMAT = FORMATS["nvfp4", 4, 16]
SHARE = 2 * WARPS * FORMAT.unit
"""Columns of which each warp has a piece."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How one launch divides its work."""

    tiles: tuple[int, ...]
    """Of a step, for each matrix."""
    places: int
    """Pieces of each warp."""
    shared: int
    """Bytes of a block."""


@cache
def plan(gpu: Gpu, shapes: tuple[tuple[int, int, bool], ...]) -> Plan | None:
    """For matrices of so many rows and columns, which may be gate and up, one behind the other; None if they don't fit."""
    tiles = tuple(_tiles(rows // TILE, gated, gpu.multiprocessors) for rows, _, gated in shapes)
    behind = max(
        columns * 2 + 2 * WARPS * of * TILE * 4 + (WARPS + 4) * 4
        for of, (_, columns, _) in zip(tiles, shapes, strict=True)
    )
    places = min(MOST, (gpu.shared_memory - behind) // (WARPS * PIECE))
    if places < LEAST or any(columns % SHARE for _, columns, _ in shapes):
        return None
    return Plan(tiles, places, places * WARPS * PIECE + behind)


def _tiles(count: int, gated: bool, blocks: int) -> int:
    """Two or three tiles a step, so that the steps come out even."""
    return 2 if gated or count <= 2 * blocks or count > 3 * blocks else 3


def takes(format_: Format, count: int) -> bool:
    """Whether this is one row and a matrix of the format that it is made for."""
    return count == 1 and format_ == FORMAT
