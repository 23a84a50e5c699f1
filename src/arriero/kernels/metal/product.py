"""Products of a few rows with a quantised matrix in MLX's layout, and what goes with them in one launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from arriero.kernels.metal.source import TYPES, Launch, Template, kernel, on_device

FORMATS = {
    **{("affine", bits, group): 0 for bits in (4, 8) for group in (32, 64, 128)},
    ("mxfp4", 4, 32): 1,
    ("mxfp8", 8, 32): 2,
    ("nvfp4", 4, 16): 3,
}
MOST_ROWS = 16
"""Rows from which decoding a matrix first, as plain MLX does in its products of many rows, is the better way."""
TILES = (1, 2, 4, 8)
"""Rows that a lane keeps at once: it holds eight numbers of each."""
COLUMNS = 4
"""Rows of a matrix that a simdgroup decodes."""
SIMDGROUPS = 2

ACTIVATIONS: dict[str | None, int] = {None: 0, "silu": 1, "gelu_tanh": 2}
"""Metal has no erf, so gelu's exact form is plain MLX's."""

Norm = tuple[mx.array, float]
"""A gain and an epsilon."""


@dataclass(frozen=True, eq=False, slots=True)
class Operand:
    """A packed matrix `[rows, in · bits / 32]`, or a bank `[experts, rows, in · bits / 32]` of them."""

    w: mx.array
    scales: mx.array
    biases: mx.array | None
    mode: str
    bits: int
    group_size: int
    global_scale: mx.array | None = None
    """Float32: one for all, or one for each row of a matrix, or for each expert of a bank."""
    bias: mx.array | None = None
    """`[rows]`, of x's type."""

    @property
    def rows(self) -> int:
        """Of one matrix."""
        return self.w.shape[-2]

    @property
    def factor(self) -> int:
        """How `global_scale` is spread, as product.metal has it."""
        if self.global_scale is None:
            return 0
        return 1 if self.global_scale.size == 1 else self.w.ndim

    def template(self) -> Template:
        """What its format decides of a kernel."""
        return [
            ("FORMAT", FORMATS[self.mode, self.bits, self.group_size]),
            ("BITS", self.bits),
            ("GROUP", self.group_size),
            ("FACTOR", self.factor),
        ]


@dataclass(frozen=True, slots=True)
class Product:
    """Results of a product."""

    y: mx.array
    x: mx.array
    """What was multiplied, before its norm: the sum with the branch where there is one."""


def takes(x: mx.array, *, mode: str, bits: int, group_size: int) -> bool:
    """Whether the kernel has this product of x `[..., in]`."""
    width = x.shape[-1]
    return x.dtype in TYPES and (mode, bits, group_size) in FORMATS and 0 < x.size <= MOST_ROWS * width


def fuses(x: mx.array, matrix: Operand, *, norm: Norm | None = None, activation: str | None = None) -> bool:
    """Whether `fused` takes rows x `[T, in]` with this matrix, norm and activation."""
    return (
        x.ndim == matrix.w.ndim == 2
        and takes(x, mode=matrix.mode, bits=matrix.bits, group_size=matrix.group_size)
        and (matrix.bias is None or matrix.bias.dtype == x.dtype)
        and (norm is None or norm[0].dtype in (x.dtype, mx.float32))
        and activation in ACTIVATIONS
        and (activation is None or matrix.rows % 2 == 0)
    )


def multiply(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    *,
    mode: str,
    bits: int,
    group_size: int,
    global_scale: mx.array | None = None,
    launch: Launch | None = None,
) -> mx.array:
    """`kernels/quantized_matmul.py` for x `[..., in]` of at most MOST_ROWS rows; sums are float32."""
    matrix = Operand(w, scales, biases, mode, bits, group_size, global_scale)
    y = fused(x.reshape(-1, x.shape[-1]), matrix, launch=launch).y
    return y if x.ndim == 2 else y.reshape(*x.shape[:-1], matrix.rows)


def fused(
    x: mx.array,
    matrix: Operand,
    *,
    branch: mx.array | None = None,
    norm: Norm | None = None,
    activation: Literal["silu", "gelu_tanh"] | None = None,
    residual: mx.array | None = None,
    launch: Launch | None = None,
) -> Product:
    """`norm(x + branch) @ Wᵀ (+ bias) (+ residual)` for rows x `[T, in]` that `fuses` accepted.

    With an activation W's rows are those of gate and of up, and y is `activation(gate) · up`. The sum with the branch
    is rounded to x's type; everything after it is float32 until y is rounded.
    """
    tile = min((size for size in TILES if size >= x.shape[0]), default=TILES[-1])
    y, total = run(
        x,
        matrix,
        turns=-(-x.shape[0] // tile),
        lines=x.shape[0],
        tile=tile,
        branch=branch,
        norm=norm,
        activation=activation,
        residual=residual,
        launch=launch,
    )
    return Product(y, x if branch is None else total)


def run(
    x: mx.array,
    matrix: Operand,
    *,
    turns: int,
    lines: int,
    tile: int,
    branch: mx.array | None = None,
    norm: Norm | None = None,
    activation: str | None = None,
    residual: mx.array | None = None,
    chosen: mx.array | None = None,
    launch: Launch | None = None,
) -> list[mx.array]:
    """One launch of `product.metal`: `turns` threadgroups deep, y `[lines, columns]`, and the sum with the branch.

    `chosen` `[lines]` uint32 names the matrix of each line out of a bank, and as many lines follow one another for each
    row of x.
    """
    rows, depth = x.shape
    gated = activation is not None
    columns = matrix.rows // 2 if gated else matrix.rows
    each = COLUMNS // 2 if gated else COLUMNS
    # What is missing is never read: any array of the type that the kernel would have there stands for it.
    scale = matrix.global_scale
    dims = mx.array([rows, columns, depth, lines // rows], mx.int32)
    return (launch or kernel("product"))(
        inputs=[
            x,
            matrix.w,
            matrix.scales,
            matrix.scales if matrix.biases is None else matrix.biases,
            x if scale is None else scale.reshape(-1).astype(mx.float32),
            x if branch is None else branch,
            x if norm is None else norm[0],
            x if matrix.bias is None else matrix.bias,
            x if residual is None else residual,
            dims if chosen is None else on_device(chosen.reshape(-1), 0),
            dims,
            mx.array([0.0 if norm is None else norm[1]], mx.float32),
        ],
        template=[
            ("T", x.dtype),
            *matrix.template(),
            ("ROWS", tile),
            ("OUT", each),
            ("NSG", SIMDGROUPS),
            ("NORM", 0 if norm is None else 1 if norm[0].dtype == x.dtype else 2),
            ("ACT", ACTIVATIONS[activation]),
            ("BRANCH", branch is not None),
            ("BIAS", matrix.bias is not None),
            ("RESIDUAL", residual is not None),
            ("EXPERTS", chosen is not None),
        ],
        grid=(32 * SIMDGROUPS, -(-columns // (each * SIMDGROUPS)), turns),
        threadgroup=(32 * SIMDGROUPS, 1, 1),
        output_shapes=[(lines, columns), (1,) if branch is None else x.shape],
        output_dtypes=[x.dtype, x.dtype],
    )
