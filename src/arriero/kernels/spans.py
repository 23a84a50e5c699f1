"""Packed spans that carry a state: what a call yields for each, and where its states are cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import mlx.core as mx

Stops = Sequence[Sequence[int]]


class Carried(NamedTuple):
    """Result of an operation that carries a state through each span."""

    y: mx.array
    """Rows of all spans, in the order of the input."""
    ends: list[mx.array]
    """Per span, its state after its last row."""
    interior: list[list[mx.array]]
    """Per span, its states after each requested number of rows."""


def checked_stops(rows: int, lengths: Sequence[int], states: int, stops: Stops | None) -> list[list[int]]:
    """The stops of each span, empty where none are asked for.

    ValueError unless there is one state per span, the lengths are positive and add up to `rows`, and each span's stops
    rise and lie strictly inside it.
    """
    if states != len(lengths) or not lengths:
        raise ValueError(f"{states} states for {len(lengths)} spans; every span needs its own")
    if min(lengths) < 1 or sum(lengths) != rows:
        raise ValueError(f"spans of {list(lengths)} rows, but {rows} were given; none may be empty")
    if stops is None:
        return [[] for _ in lengths]
    if len(stops) != len(lengths):
        raise ValueError(f"stops for {len(stops)} of {len(lengths)} spans")
    for length, wanted in zip(lengths, stops, strict=True):
        bounds = [0, *wanted, length]
        if any(low >= high for low, high in pairwise(bounds)):
            raise ValueError(f"stops {list(wanted)} of a span of {length} rows must rise and lie strictly inside it")
    return [list(wanted) for wanted in stops]


def carried(y: mx.array, states: Sequence[Sequence[mx.array]]) -> Carried:
    """From rows and, per span, all its states, the end's last."""
    return Carried(y, [s[-1] for s in states], [list(s[:-1]) for s in states])


def joined(parts: Sequence[mx.array]) -> mx.array:
    """Parts concatenated along the first axis."""
    return parts[0] if len(parts) == 1 else mx.concatenate(list(parts), axis=0)
