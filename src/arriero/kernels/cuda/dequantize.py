"""Packed matrices decoded to bfloat16, for products of many rows."""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from arriero.kernels.cuda.product import FEW, Operand
from arriero.kernels.cuda.source import Kernel

THREADS = 256
WORDS = 4
"""Words of 32 bits that one thread decodes."""
LARGEST = 1 << 31
"""Words of a matrix: the kernel counts them in 32 bits."""


def takes(x: mx.array, matrix: Operand | None) -> bool:
    """Whether a product of these rows is better made of the decoded matrix."""
    return (
        matrix is not None
        and matrix.experts == 0
        and x.dtype == mx.bfloat16
        and x.shape[-1] == matrix.columns
        and x.size // matrix.columns > FEW
        and matrix.w.size % (THREADS * WORDS) == 0
        and matrix.w.size < LARGEST
    )


@cache
def kernel(affine: bool, undo: str, factors: bool) -> Kernel:
    """The kernel for formats with or without biases, and for matrices with or without factors of their rows."""
    return Kernel(
        name="dequantize",
        inputs=("w", "scales", *(("biases",) if affine else ()), *(("factors",) if factors else ())),
        outputs=("out",),
        headers=("numbers", "formats"),
        body="dequantize_body",
        threads=THREADS,
        defines=(
            ("BIASES", "biases" if affine else "nullptr"),
            ("UNDO", undo),
            ("FACTORS", "factors" if factors else "nullptr"),
        ),
    )


def dequantize(matrix: Operand, *, factored: bool = False) -> mx.array:
    """`[rows, columns]` in bfloat16: exact but for affine formats and, `factored`, those with factors: rounded once."""
    factors = matrix.factors if factored else None
    made = kernel(matrix.format.affine, matrix.format.undo, factors is not None)(
        [matrix.w, matrix.scales, *(part for part in (matrix.biases, factors) if part is not None)],
        {"MODE": matrix.format.code, "GROUP": matrix.format.group, "K_": matrix.columns, "WORDS": WORDS},
        blocks=(matrix.w.size // (THREADS * WORDS), 1, 1),
        shapes=[(matrix.rows, matrix.columns)],
        dtypes=[mx.bfloat16],
    )
    return made[0]


def multiply(x: mx.array, matrix: Operand, residual: mx.array | None = None) -> mx.array:
    """`x @ Wᵀ (+ bias) (+ residual)` for bfloat16 x `[..., columns]` that `takes` accepted, in bfloat16."""
    w = dequantize(matrix, factored=True).T
    y = x @ w if residual is None else mx.addmm(residual, x, w)
    return y if matrix.bias is None else y + matrix.bias
