"""Rows of a table that the host has chosen, decoded in one launch: for tables of n-grams, which stay packed."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from arriero.kernels.cuda.source import Kernel

KERNEL = Kernel(
    name="ple",
    inputs=("rows", "places"),
    outputs=("out",),
    headers=("numbers",),
    body="ple_body",
    threads=256,
)
KINDS = {"F32": 0, "BF16": 1, "F8_E4M3": 2, "nvfp4": 3, "mxfp4": 4, "mxfp8": 5, "affine": 6}
"""Numbers of the kernel for element types and packed modes."""


@dataclass(frozen=True, slots=True)
class Rows:
    """How the bytes of a row lie side by side: codes, scales, biases, and a float32 factor where there is one."""

    kind: int
    width: int
    bits: int
    group: int
    parts: tuple[int, ...]
    """Bytes of codes, scales and biases."""
    factor: bool

    @property
    def factor_at(self) -> int:
        """Where the factor begins, a multiple of 4; 0 without one."""
        return -(-sum(self.parts) // 4) * 4 if self.factor else 0

    @property
    def stride(self) -> int:
        """Bytes from row to row."""
        return self.factor_at + 4 if self.factor else -(-sum(self.parts) // 4) * 4


def rows_of(
    kind: str, width: int, bits: int, group: int, columns: Sequence[tuple[int, str]], *, factor: bool, dtype: mx.Dtype
) -> Rows | None:
    """The layout of rows of `width` numbers; None for what the kernel does not take.

    `kind` is a mode or an element type as in `KINDS`, `columns` the bytes of each part of a row and its type.
    """
    affine = kind == "affine"
    if kind not in KINDS or width % 8 or dtype not in (mx.bfloat16, mx.float32):
        return None
    if affine and (bits not in (4, 8) or len(columns) != 3 or any(name != "bfloat16" for _, name in columns[1:])):
        return None
    return Rows(KINDS[kind], width, bits, max(group, 1), tuple(size for size, _ in columns), factor)


def packed(
    layout: Rows, columns: Sequence[np.ndarray], factors: np.ndarray | None, places: np.ndarray, *, count: int = 0
) -> np.ndarray:
    """One array of bytes: rows `[n, stride]` of the columns side by side, then `places` as int32.

    Without columns the rows are `count` that hold nothing yet.
    """
    count = len(columns[0]) if columns else count
    edge = count * layout.stride
    made = np.empty(edge + 4 * places.size, np.uint8)
    if columns:
        fill(layout, made[:edge].reshape(count, layout.stride), columns, factors)
    made[edge:] = np.ascontiguousarray(places, np.int32).view(np.uint8).reshape(-1)
    return made


def put(layout: Rows, place: mx.array, columns: Sequence[np.ndarray], factors: np.ndarray | None) -> None:
    """Write rows of the columns to the front of `place`, which the host has made, and nothing has computed with yet."""
    count = len(columns[0])
    rows = np.empty((count, layout.stride), np.uint8)
    fill(layout, rows, columns, factors)
    held = np.asarray(place)
    ctypes.memmove(held.ctypes.data, rows.ctypes.data, rows.nbytes)


def fill(layout: Rows, rows: np.ndarray, columns: Sequence[np.ndarray], factors: np.ndarray | None) -> None:
    """Columns side by side in `rows` `[n, stride]`."""
    count, at = len(rows), 0
    for column, size in zip(columns, layout.parts, strict=True):
        rows[:, at : at + size] = np.ascontiguousarray(column).view(np.uint8).reshape(count, size)
        at += size
    if factors is not None:
        rows[:, layout.factor_at :] = np.ascontiguousarray(factors, np.float32).view(np.uint8).reshape(count, 4)


def decode(layout: Rows, bytes_: mx.array, count: int, dtype: mx.Dtype) -> mx.array:
    """From what `packed` made of `count` rows: those that `places` name, `[len(places), width]` of `dtype`."""
    edge = count * layout.stride
    places = bytes_[edge:].view(mx.int32)
    made = KERNEL(
        [bytes_[:edge], places],
        {
            "KIND": layout.kind,
            "WIDTH": layout.width,
            "BITS": layout.bits,
            "GROUP": layout.group,
            "STRIDE": layout.stride,
            "SCALES_AT": layout.parts[0],
            "FACTOR_AT": layout.factor_at,
            "WIDE": dtype == mx.float32,
        },
        blocks=(-(-places.size * layout.width // 8 // KERNEL.threads), 1, 1),
        shapes=[(places.size, layout.width)],
        dtypes=[dtype],
    )
    return made[0]
