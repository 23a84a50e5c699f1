"""Quantised matrices in the layout of the CPU kernels, made once of MLX's.

Products read sixteen output columns side by side in one stream. Nobody needs MLX's layout beside it, so whoever packs a
matrix lets the original go.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from arriero.kernels import device


@dataclass(frozen=True, eq=False, slots=True)
class Packed:
    """A matrix `[rows, columns]`, or a bank `[experts, rows, columns]`, for products `x @ Wᵀ`."""

    native: Any
    """The extension's own object."""
    rows: int
    columns: int
    experts: int
    """0 for a single matrix."""
    nbytes: int
    """Bytes that a product reads; the arrays hold some more, up to whole pages."""
    arrays: tuple[mx.array, ...]
    """What holds it, computed."""


def packable(mode: str, bits: int, group_size: int) -> bool:
    """Whether products here want matrices of this format packed: on a CPU with the extension, and not mxfp8."""
    native = device.native()
    return native is not None and native.packable(mode, bits, group_size)


def pack(
    w: mx.array, scales: mx.array, biases: mx.array | None, *, group_size: int, bits: int, mode: str
) -> Packed | None:
    """MLX's layout `[(experts,) out, in · bits / 32]` repacked at once; None where products read MLX's (`packable`).

    Both layouts are in memory until the caller lets the original go.
    """
    native = device.native()
    if native is None or not native.packable(mode, bits, group_size):
        return None
    made = native.pack(w, scales, biases, group_size=group_size, bits=bits, mode=mode)
    return Packed(made, made.rows, made.columns, made.experts, made.nbytes, tuple(made.arrays))
