"""The gated delta rule over spans with states of their own, and the whole middle of a delta net for few tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from arriero.kernels.cuda.product import Norm, bits_of
from arriero.kernels.cuda.source import Kernel
from arriero.kernels.cuda.spans import ROWS, filled, named, table

LONGEST = 16
"""The most tokens of a span that `step` takes: they lie in shared memory together."""
TILE = 32
"""Tokens that `scan` has in shared memory at a time, no more than a block has threads."""
SLICE = 32
"""Rows of a state that a block of `scan` keeps."""

Gates = tuple[mx.array, int]
"""Rows, and where b begins in them, which a follows."""


@dataclass(frozen=True, eq=False, slots=True)
class Projected:
    """b and a as products of `norm(hidden)` `[T, width]` with w `[2 · heads, width]`, b's rows first, bfloat16."""

    hidden: mx.array
    w: mx.array
    norm: Norm | None


State = tuple[mx.array, mx.array]
"""A tail `[1, taps − 1, channels]` and a state `[1, heads, width, key_dim]`."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Consecutive value heads share a key head."""

    key_heads: int
    heads: int
    key_dim: int
    width: int
    """Of a value head."""

    @property
    def channels(self) -> int:
        """Of q, k and v together."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.width

    @property
    def state(self) -> tuple[int, int, int]:
        return self.heads, self.width, self.key_dim


def scans(heads: Heads, dtype: mx.Dtype) -> bool:
    """Whether `scan` has heads of this form."""
    return (
        dtype in (mx.bfloat16, mx.float32) and heads.key_dim % 16 == 0 and heads.key_dim <= 256 and heads.width % 8 == 0
    )


def steps(heads: Heads, dtype: mx.Dtype, lengths: Sequence[int]) -> bool:
    """Whether `step` has heads of this form and takes these spans."""
    return (
        dtype == mx.bfloat16
        and scans(heads, dtype)
        and heads.key_dim <= 128
        and heads.width <= 128
        and max(lengths) <= LONGEST
    )


@cache
def kernel(
    spans: int, rows: int, tile: int, key_dim: int, whole: bool, stops: bool, projected: bool, normed: bool
) -> Kernel:
    """The kernel of blocks with `rows` rows of a state; `whole`: convolution and norm are taken in.

    `projected`: so are the products that give b and a, of what is normed or not.
    """
    tails = [("t", "t_end", "t_kept")] if whole else []
    groups = [("s", "s_end", "s_kept"), *tails]
    return Kernel(
        name="gated_delta",
        inputs=(
            *("x", "rate", "bias", "table"),
            *(("hidden", "w", *(("hidden_gain",) if normed else ())) if projected else ("gates",)),
            *(("taps", "gain") if whole else ()),
            *(name for group in groups for name in named(group[0], spans)),
        ),
        outputs=(
            "y",
            *(name for group in groups for name in named(group[1], spans)),
            *(name for group in groups if stops for name in named(group[2], spans)),
        ),
        headers=("numbers", "spans", "gated_delta"),
        body="gated_delta_body",
        threads=4 * rows,
        shared=tile * (2 * key_dim + 2 * rows + 2 + (3 * rows // 8 if projected else 0)) * 4,
        defines=(
            ("SPANS", str(spans)),
            *((("TAILS", "1"),) if whole else ()),
            *((("STOPS", "1"),) if stops else ()),
            ("HIDDEN_GAIN", "hidden_gain" if normed else "nullptr") if projected else ("GATES", "1"),
        ),
    )


@dataclass(frozen=True, eq=False, slots=True)
class Made:
    """Rows, and of each span its states after each stop and after its last token."""

    y: mx.array
    ends: list[mx.array]
    interior: list[list[mx.array]]
    tails: list[mx.array]
    interior_tails: list[list[mx.array]]


def scan(
    heads: Heads,
    x: mx.array,
    gates: Gates,
    *,
    rate: mx.array,
    bias: mx.array,
    states: Sequence[mx.array],
    lengths: Sequence[int],
    stops: Sequence[Sequence[int]],
    eps: float,
) -> Made:
    """The rule over rows x of q, k and v, `[T, channels]`, with gates of their type, which y has, too.

    States are float32 `[…, heads, width, key_dim]`, and so are those that it gives; y is `[T, heads · width]`.
    """
    parts: list[Made] = []
    start = 0
    for first in range(0, len(lengths), ROWS):
        some = slice(first, first + ROWS)
        count = sum(lengths[some])
        rows = slice(start, start + count)
        alone = len(lengths) <= ROWS
        parts.append(
            _launch(
                heads,
                x if alone else x[rows],
                gates if alone else _rows_of(gates, rows),
                rate,
                bias,
                states[some],
                tuple(lengths[some]),
                tuple(tuple(wanted) for wanted in stops[some]),
                eps,
            )
        )
        start += count
    return _joined(parts)


@dataclass(frozen=True, eq=False, slots=True)
class Around:
    """What of a delta net stands before and behind the rule."""

    taps: mx.array
    """`[taps, channels]`, the oldest first."""
    gain: mx.array
    """Of the norm, float32 `[width]`."""
    norm_eps: float
    silu: bool
    """What the result is multiplied by, of z: silu, or else sigmoid."""


def step(
    heads: Heads,
    around: Around,
    x: mx.array,
    gates: Gates | Projected,
    z_at: int,
    *,
    rate: mx.array,
    bias: mx.array,
    held: Sequence[State],
    lengths: Sequence[int],
    stops: Sequence[Sequence[int]],
    eps: float,
) -> Made:
    """`gate(z) · norm(rule(silu(convolution(x))))` for few tokens of each span, bfloat16 `[T, heads · width]`.

    Rows of x begin with the channels of q, k and v, and hold z from element `z_at` on. `held` are the spans'
    tails and states; the new ones have their form, with stops along the first axis.
    """
    parts: list[Made] = []
    start = 0
    for first in range(0, len(lengths), ROWS):
        some = slice(first, first + ROWS)
        count = sum(lengths[some])
        rows = slice(start, start + count)
        alone = len(lengths) <= ROWS
        parts.append(
            _launch(
                heads,
                x if alone else x[rows],
                gates if alone else _rows_of(gates, rows),
                rate,
                bias,
                [state for _, state in held[some]],
                tuple(lengths[some]),
                tuple(tuple(wanted) for wanted in stops[some]),
                eps,
                around,
                z_at,
                [tail for tail, _ in held[some]],
            )
        )
        start += count
    return _joined(parts)


def _launch(
    heads: Heads,
    x: mx.array,
    gates: Gates | Projected,
    rate: mx.array,
    bias: mx.array,
    states: Sequence[mx.array],
    lengths: tuple[int, ...],
    stops: tuple[tuple[int, ...], ...],
    eps: float,
    around: Around | None = None,
    z_at: int = 0,
    tails: Sequence[mx.array] = (),
) -> Made:
    count, spans = len(lengths), 1 if len(lengths) == 1 else ROWS
    whole = around is not None
    rows = heads.width if whole else next(size for size in (SLICE, 16, 8) if heads.width % size == 0)
    tile = LONGEST if whole else TILE
    tile = next(size for size in (1, 4, 8, 16, tile) if size >= min(tile, max(lengths)))
    kept = any(stops)
    inputs = [x, rate, bias, table(lengths, stops)]
    norm: Norm | None = None
    if isinstance(gates, Projected):
        norm = gates.norm
        inputs += [gates.hidden, gates.w, *([] if norm is None else [norm[0]])]
        of_gates = {"GATE_WIDTH": 0, "HIDDEN": gates.hidden.shape[1]}
    else:
        inputs.append(gates[0])
        of_gates = {"GATE_WIDTH": gates[0].shape[1], "HIDDEN": 0, "B_AT": gates[1], "A_AT": gates[1] + heads.heads}
    if around is not None:
        inputs += [around.taps, around.gain]
    inputs += filled(states, spans)
    shapes: list[tuple[int, ...]] = [(x.shape[0], heads.heads * heads.width)]
    groups: list[tuple[int, ...]] = [heads.state]
    if around is not None:
        inputs += filled(tails, spans)
        groups.append((around.taps.shape[0] - 1, heads.channels))
    nothing: list[tuple[int, ...]] = [(1,)] * (spans - count)
    for form in groups:
        shapes += [(1, *form)] * count + nothing
    for form in groups if kept else ():
        shapes += [(len(wanted), *form) if wanted else (1,) for wanted in stops] + nothing
    dtypes = [mx.float32, mx.bfloat16][: len(groups)] * (2 if kept else 1)
    made = kernel(spans, rows, tile, heads.key_dim, whole, kept, isinstance(gates, Projected), norm is not None)(
        inputs,
        {
            "DK": heads.key_dim,
            "DV": heads.width,
            "HK": heads.key_heads,
            "HV": heads.heads,
            "ROWS": rows,
            "TILE": tile,
            "TAPS": 1 if around is None else around.taps.shape[0],
            "X_WIDTH": x.shape[1],
            "Z_AT": z_at,
            **of_gates,
            "WIDE_GAIN": norm is not None and norm[0].dtype == mx.float32,
            "HIDDEN_EPS_BITS": bits_of(0.0 if norm is None else norm[1]),
            "READY": not whole,
            "WIDE": x.dtype == mx.float32,
            "SILU": around is not None and around.silu,
            "EPS_BITS": bits_of(eps),
            "NORM_EPS_BITS": bits_of(0.0 if around is None else around.norm_eps),
        },
        blocks=(heads.width // rows, heads.heads, count),
        shapes=shapes,
        dtypes=[x.dtype, *(dtype for dtype in dtypes for _ in range(spans))],
    )
    y, *rest = made
    ends, interior = _of_each(rest, 0, spans, stops, len(groups), kept)
    if not whole:
        return Made(y, ends, interior, [], [])
    tail_ends, interior_tails = _of_each(rest, 1, spans, stops, len(groups), kept)
    return Made(y, ends, interior, tail_ends, interior_tails)


def _rows_of(gates: Gates | Projected, rows: slice) -> Gates | Projected:
    if isinstance(gates, Projected):
        return Projected(gates.hidden[rows], gates.w, gates.norm)
    return gates[0][rows], gates[1]


def _of_each(
    made: Sequence[mx.array], group: int, spans: int, stops: Sequence[Sequence[int]], groups: int, kept: bool
) -> tuple[list[mx.array], list[list[mx.array]]]:
    """A group's arrays at the ends of the spans, and after their stops."""
    count = len(stops)
    ends = list(made[group * spans : group * spans + count])
    if not kept:
        return ends, [[] for _ in stops]
    at = (groups + group) * spans
    return ends, [[made[at + i][j : j + 1] for j in range(len(stops[i]))] for i in range(count)]


def _joined(parts: Sequence[Made]) -> Made:
    if len(parts) == 1:
        return parts[0]
    return Made(
        mx.concatenate([part.y for part in parts]),
        [end for part in parts for end in part.ends],
        [kept for part in parts for kept in part.interior],
        [tail for part in parts for tail in part.tails],
        [kept for part in parts for kept in part.interior_tails],
    )
