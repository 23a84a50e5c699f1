"""Weights packed once into strips of output columns, and their products."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from . import _native
else:
    from arriero_cpu import _native


def packable(mode: str, bits: int, group_size: int) -> bool:
    """Whether :func:`pack` takes the format."""
    return _native.packable(mode, bits, group_size)


def pack(
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None = None,
    *,
    group_size: int,
    bits: int,
    mode: str = "affine",
) -> _native.Packed:
    """Packs ``w`` [N, packed K] or [experts, N, packed K] from MLX's layout.

    Computes its arguments and the result at once; nothing of the arguments is kept. Biases that are all the same whole
    number of (negative) scales, as those of sources without a minimum are, take no room. ``nbytes`` is what the result
    holds and ``arrays`` the arrays that hold it. ValueError where the format is not :func:`packable` or shapes and
    dtypes do not go together.
    """
    return _native.pack(w, scales, biases, group_size, bits, mode)


def _scale(value: mx.array | float | None) -> mx.array | None:
    return mx.array(value, mx.float32) if isinstance(value, (int, float)) else value


def packed_matmul(
    x: mx.array, packed: _native.Packed, *, global_scale: mx.array | float | None = None, exact: bool = True
) -> mx.array:
    """``x @ dequantised(packed).T`` for ``x`` [..., K]; the result has ``x``'s dtype.

    ``global_scale``, one float or one per column of the result, multiplies it. A row's result does not depend on the
    other rows. ``exact=False`` allows 7-bit activations for 13 or more rows of 16-bit floats.
    """
    return _native.packed_matmul(x, packed, _scale(global_scale), exact)


def packed_gather(
    x: mx.array,
    packed: _native.Packed,
    indices: mx.array,
    *,
    global_scale: mx.array | float | None = None,
    exact: bool = True,
) -> mx.array:
    """Each row of ``x`` [T, K] times the weights of its experts: ``indices`` [T] or [T, k], in any order.

    Returns [T, N] or [T, k, N]. ``global_scale`` is a float, or holds one per expert. An index outside the experts
    gives zeros.
    """
    return _native.packed_gather(x, packed, indices, _scale(global_scale), exact)


def packed_rows(
    packed: _native.Packed, ids: mx.array, *, global_scale: mx.array | float | None = None, dtype: mx.Dtype
) -> mx.array:
    """The rows ``ids`` [T] of the packed matrix, dequantised; zeros for an id outside the rows."""
    return _native.packed_rows(packed, ids, _scale(global_scale), dtype)
