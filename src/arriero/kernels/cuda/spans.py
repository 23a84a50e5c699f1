"""Launches over rows that each go on from a state of their own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import mlx.core as mx
import numpy as np

from arriero.kernels.cuda.source import argument

ROWS = 8
"""The most rows whose states one launch takes."""


@lru_cache(maxsize=256)
def table(lengths: tuple[int, ...], stops: tuple[tuple[int, ...], ...]) -> mx.array:
    """Of each span its first token, its length, where its stops are in this table and how many; then the stops.

    int32 in the device's own memory, made once: a decode step comes again and again.
    """
    lines: list[tuple[int, int, int, int]] = []
    first, at = 0, 4 * len(lengths)
    for length, wanted in zip(lengths, stops, strict=True):
        lines.append((first, length, at, len(wanted)))
        first += length
        at += len(wanted)
    numbers = [number for line in lines for number in line] + [stop for wanted in stops for stop in wanted]
    made = argument(mx.array(np.array(numbers, np.int32)))
    mx.eval(made)
    return made


def named(name: str, count: int) -> tuple[str, ...]:
    """Arguments of `count` rows."""
    return tuple(f"{name}{i}" for i in range(count))


def filled(arrays: Sequence[mx.array], count: int) -> list[mx.array]:
    """Arrays of `count` rows: the first stands for those that are not there."""
    return [*arrays, *[arrays[0]] * (count - len(arrays))]
