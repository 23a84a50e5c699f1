"""Products of few rows with matrices in NVFP4 whose weights pass through shared memory, ahead of their decoding."""

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
PLACES = 4
"""Pieces of each warp that are on their way or there (H200: with five a row of Qwen3-8B takes 1 % longer)."""
RING = PLACES * WARPS * PIECE
ROWS = (1, 8)
"""Rows of x that kernels are compiled for."""
FORMAT = FORMATS["nvfp4", 4, 16]
SHARE = 2 * WARPS * FORMAT.unit
"""Columns of which each warp has a piece."""
OVER_X, IN_ONE, IN_TURN = 0, 1, 2
"""Where sums stand, as stream.cu names it."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A matrix `[rows, columns]`, and what x is to it."""

    rows: int
    columns: int
    gated: bool = False
    plain: bool = True
    """Whether x is multiplied as it is, without a norm or a sum before."""


@dataclass(frozen=True, slots=True)
class Part:
    """How a launch does one product."""

    tiles: int
    """Of a step."""
    staged: bool
    """Whether x stands in shared memory."""
    sums: int
    shared: int
    """Bytes behind the ring."""

    def template(self, prefix: str = "") -> dict[str, int | bool]:
        """Its constants, whose names begin with `prefix`."""
        return {f"{prefix}TILES": self.tiles, f"{prefix}STAGED": self.staged, f"{prefix}SUMS": self.sums}


@dataclass(frozen=True, slots=True)
class Plan:
    """How one launch divides its work."""

    rows: int
    """Of x, as compiled."""
    parts: tuple[Part, ...]
    """One for each matrix."""
    shared: int
    """Bytes of a block."""


@cache
def plan(gpu: Gpu, shapes: tuple[Shape, ...], count: int) -> Plan | None:
    """For `count` rows and such matrices, one behind the other; None where they don't fit."""
    rows = next((rows for rows in ROWS if rows >= count), 0)
    if not rows or any(shape.columns % SHARE for shape in shapes):
        return None
    parts = tuple(part for shape in shapes if (part := _part(gpu, shape, rows)) is not None)
    return Plan(rows, parts, RING + max(part.shared for part in parts)) if len(parts) == len(shapes) else None


@cache
def plan_alone(gpu: Gpu, shape: Shape, count: int) -> Plan | None:
    """For one matrix in a launch of its own; None where product.cu does as well.

    With several rows that is wherever x leaves room for it (H200, 8 rows: 4096 × 12288 takes 19 µs instead of 24, but
    8192 × 8192 25 instead of 20).
    """
    found = plan(gpu, (shape,), count)
    if found is None or count == 1:
        return found
    part = found.parts[0]
    wide = found.rows * shape.columns * 2 > gpu.shared_memory // 2
    return found if wide and not part.staged and _once(gpu, shape.rows // TILE, part.tiles) else None


def _once(gpu: Gpu, count: int, tiles: int) -> bool:
    """Whether each block has one step at most."""
    return -(-count // tiles) <= gpu.multiprocessors


def _part(gpu: Gpu, shape: Shape, rows: int) -> Part | None:
    """The first way of placing sums that has room."""
    count = shape.rows // TILE
    tiles = 2 if shape.gated or count <= 2 * gpu.multiprocessors or count > 3 * gpu.multiprocessors else 3
    once, room = _once(gpu, count, tiles), gpu.shared_memory - RING
    x, norms = rows * shape.columns * 2, 4 * (16 + rows * WARPS)
    sums = WARPS * tiles * 4 * (TILE if rows == 1 else 128)
    # x of one step is read once, and as well from where it lies.
    apart = rows > 1 and shape.plain and (once or x + sums + norms > room)
    for place in (IN_ONE, OVER_X) if once else (IN_TURN, IN_ONE):
        shared = (0 if apart else x) + place * sums + norms
        if shared <= room and not (apart and place == OVER_X):
            return Part(tiles, not apart, place, shared)
    return None


def takes(format_: Format, count: int) -> bool:
    """Whether these are few rows and a matrix of the format that it is made for."""
    return count <= ROWS[-1] and format_ == FORMAT
