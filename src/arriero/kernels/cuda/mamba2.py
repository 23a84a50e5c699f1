"""The selective state space of Mamba-2 over spans with states of their own, in one launch for up to 8 spans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from arriero.kernels.cuda.product import bits_of
from arriero.kernels.cuda.source import Kernel
from arriero.kernels.cuda.spans import ROWS, filled, named, table

SLICES = (32, 16, 8)
"""Rows of a state that a block may keep."""
TILE = 32
"""Tokens in shared memory at a time."""
LARGEST = 3.4028234663852886e38


@dataclass(frozen=True, slots=True)
class Heads:
    """Consecutive heads share a group's b and c."""

    heads: int
    width: int
    groups: int
    size: int
    """Of a row of a state."""

    @property
    def columns(self) -> int:
        """Of rows that hold x, b and c."""
        return self.heads * self.width + 2 * self.groups * self.size

    @property
    def state(self) -> tuple[int, int, int]:
        return self.heads, self.width, self.size


def takes(heads: Heads, dtype: mx.Dtype) -> bool:
    """Whether `scan` has heads of this form."""
    return dtype in (mx.bfloat16, mx.float32) and heads.size % 16 == 0 and heads.size <= 256 and heads.width % 8 == 0


@cache
def kernel(spans: int, rows: int, tile: int, size: int, stops: bool) -> Kernel:
    """The kernel of blocks with `rows` rows of a state."""
    return Kernel(
        name="mamba2",
        inputs=("x", "dt", "rate", "bias", "skip", "table", *named("s", spans)),
        outputs=("y", *named("s_end", spans), *(named("s_kept", spans) if stops else ())),
        headers=("numbers", "spans", "mamba2"),
        body="mamba2_body",
        threads=4 * rows,
        shared=tile * (2 * size + rows + 2) * 4,
        defines=(("SPANS", str(spans)), *((("STOPS", "1"),) if stops else ())),
    )


def scan(
    heads: Heads,
    x: mx.array,
    dt: tuple[mx.array, int],
    *,
    rate: mx.array,
    bias: mx.array,
    skip: mx.array,
    states: Sequence[mx.array],
    lengths: Sequence[int],
    stops: Sequence[Sequence[int]],
    limits: tuple[float, float],
) -> tuple[mx.array, list[list[mx.array]]]:
    """`kernels/mamba2.py` over rows of x, b and c `[T, columns]`, and rows that hold dt from an element on.

    y is `[T, heads, width]` in their type; each span has its states, `[heads, width, size]`, after its stops and at its
    end.
    """
    outputs: list[mx.array] = []
    every: list[list[mx.array]] = []
    start = 0
    for first in range(0, len(lengths), ROWS):
        some = slice(first, first + ROWS)
        count = sum(lengths[some])
        rows = slice(start, start + count)
        alone = len(lengths) <= ROWS
        y, found = _launch(
            heads,
            x if alone else x[rows],
            dt if alone else (dt[0][rows], dt[1]),
            [rate, bias, skip],
            states[some],
            tuple(lengths[some]),
            tuple(tuple(wanted) for wanted in stops[some]),
            limits,
        )
        outputs.append(y)
        every += found
        start += count
    y = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
    return y.reshape(-1, heads.heads, heads.width), every


def _launch(
    heads: Heads,
    x: mx.array,
    dt: tuple[mx.array, int],
    constants: Sequence[mx.array],
    states: Sequence[mx.array],
    lengths: tuple[int, ...],
    stops: tuple[tuple[int, ...], ...],
    limits: tuple[float, float],
) -> tuple[mx.array, list[list[mx.array]]]:
    count, spans, kept = len(lengths), 1 if len(lengths) == 1 else ROWS, any(stops)
    rows = next(size for size in SLICES if heads.width % size == 0)
    tile = next(size for size in (1, 4, 8, 16, TILE) if size >= min(TILE, max(lengths)))
    nothing: list[tuple[int, ...]] = [(1,)] * (spans - count)
    shapes: list[tuple[int, ...]] = [(x.shape[0], heads.heads * heads.width), *[heads.state] * count, *nothing]
    if kept:
        shapes += [(len(wanted), *heads.state) if wanted else (1,) for wanted in stops] + nothing
    y, *rest = kernel(spans, rows, tile, heads.size, kept)(
        [x, dt[0], *constants, table(lengths, stops), *filled(states, spans)],
        {
            "P_": heads.width,
            "N_": heads.size,
            "H_": heads.heads,
            "G_": heads.groups,
            "ROWS": rows,
            "TILE": tile,
            "DT_WIDTH": dt[0].shape[1],
            "DT_AT": dt[1],
            "WIDE": x.dtype == mx.float32,
            "LOW_BITS": bits_of(limits[0]),
            "HIGH_BITS": bits_of(min(limits[1], LARGEST)),
        },
        blocks=(heads.width // rows, heads.heads, count),
        shapes=shapes,
        dtypes=[x.dtype, *[mx.float32] * (len(shapes) - 1)],
    )
    return y, [[*(rest[spans + i][j] for j in range(len(stops[i]))), rest[i]] for i in range(count)]
