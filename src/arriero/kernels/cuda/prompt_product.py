"""Products of many rows with a packed matrix on GPUs with warpgroups: decoded in registers, nothing of it written."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from arriero.kernels.cuda.formats import Format
from arriero.kernels.cuda.gpu import Gpu
from arriero.kernels.cuda.product import ACTIVATIONS, FEW, Activation, Operand
from arriero.kernels.cuda.source import Kernel

STAGE = 64
"""Numbers of a row of x that are brought together."""
ROW_THREADS = 256
MOST = 65_408
"""Rows of x: blocks are counted in 16 bits."""


@dataclass(frozen=True, slots=True)
class Form:
    """How one launch divides its work."""

    tiles: int
    """Times 64 rows of W of a warpgroup."""
    columns: int
    """Rows of x of a block."""
    depth: tuple[int, int]
    """Units of each row of W under way, in formats of 4 and of 8 bits."""
    groups: int = 2
    """Warpgroups."""
    stages: int = 8
    cluster: int = 2
    """Blocks that share the reading of x."""

    @property
    def rows(self) -> int:
        """Rows of W of a block."""
        return 64 * self.tiles * self.groups

    @property
    def threads(self) -> int:
        """Those that multiply and one warp that copies, or a warpgroup where it gives its registers to the others."""
        return 128 * self.groups + (128 if self.tiles > 1 else 32)

    @property
    def shared(self) -> int:
        """Bytes of shared memory: barriers, stages of x, and what aligning them may take."""
        return 2 * 1024 + self.stages * self.columns * STAGE * 2


LARGE = Form(2, 128, depth=(2, 3))
MIDDLE = Form(1, 128, depth=(3, 5))
SMALL = Form(1, 64, depth=(6, 6), groups=1)
FORMS = (LARGE, MIDDLE, SMALL)
MOST_COLUMNS = 128
"""Of a block of any form."""


def form_for(gpu: Gpu, count: int, rows: int) -> Form:
    """The form for `count` rows of x and `rows` of W: what takes the fewest waves, each as long as a block's work."""

    def cost(form: Form) -> float:
        blocks = -(-count // form.columns) * -(-rows // form.rows)
        return -(-blocks // gpu.multiprocessors) * (form.columns * form.rows + 4096)

    return min(FORMS, key=cost)


def takes(gpu: Gpu, x: mx.array, matrix: Operand | None) -> bool:
    """Whether `multiply` computes this: more than `FEW` bfloat16 rows on a GPU of compute capability 9.0."""
    return (
        matrix is not None
        and gpu.capability == (9, 0)
        and matrix.experts == 0
        and x.dtype == mx.bfloat16
        and x.shape[-1] == matrix.columns
        and FEW < x.size // matrix.columns <= MOST
    )


@cache
def rows_kernel() -> Kernel:
    """The kernel that puts x in order."""
    return Kernel(
        name="prompt_rows",
        inputs=("x",),
        outputs=("out",),
        headers=("numbers", "formats", "ordered"),
        body="prompt_rows_body",
        threads=ROW_THREADS,
    )


@cache
def kernel(form: Form, present: frozenset[str]) -> Kernel:
    """The kernel of a form, for matrices that have what `present` names."""
    optional = ("biases", "factors", "bias")
    return Kernel(
        name="prompt_product",
        inputs=("x", "counted", "w", "scales", *(name for name in optional if name in present)),
        outputs=("out",),
        headers=("numbers", "formats", "product", "ordered", "warpgroup", "prompt_product"),
        body="prompt_product_body",
        threads=form.threads,
        shared=form.shared,
        defines=(
            ("CLUSTER", str(form.cluster)),
            *((name.upper(), name if name in present else "nullptr") for name in optional),
        ),
    )


def padded(count: int) -> int:
    """Rows of tiles for `count` rows of x: whole blocks of every form."""
    return -(-count // MOST_COLUMNS) * MOST_COLUMNS


@dataclass(frozen=True, eq=False, slots=True)
class Ordered:
    """Rows of x as the products here read them."""

    tiles: mx.array
    """`[columns / 64, padded rows, 64]`."""
    counted: mx.array
    """Any array of as many rows as x."""
    unit: int
    """The unit of the formats that it is ordered for."""


def order(x: mx.array, unit: int) -> Ordered:
    """Rows x `[count, columns]` for matrices with such units."""
    count, columns = x.shape
    rows = padded(count)
    tiles = rows_kernel()(
        [x],
        {"UNIT": unit},
        blocks=(-(-columns // 8 // ROW_THREADS), rows, 1),
        shapes=[(columns // STAGE, rows, STAGE)],
        dtypes=[mx.bfloat16],
    )[0]
    return Ordered(tiles, x, unit)


def multiply(gpu: Gpu, x: mx.array, matrix: Operand, form: Form | None = None) -> mx.array:
    """`x @ Wᵀ (+ bias)` for bfloat16 x `[..., columns]` that `takes` accepted, in bfloat16.

    A row's numbers are summed in the same order whatever the form, so its result is the same beside any others.
    """
    rows = x.reshape(-1, matrix.columns)
    y = product(gpu, order(rows, matrix.format.unit), matrix, form)
    return y if x.ndim == 2 else y.reshape(*x.shape[:-1], matrix.rows)


def product(gpu: Gpu, x: Ordered, matrix: Operand, form: Form | None = None) -> mx.array:
    """`x @ Wᵀ (+ bias)` `[count, rows]`, bfloat16."""
    count = x.counted.shape[0]
    return _launch(x, matrix, form or form_for(gpu, count, matrix.rows), None, 0, (count, matrix.rows))


def gated(x: Ordered, matrix: Operand, activation: Activation) -> mx.array:
    """`activation(gate) · up` `[count, rows / 2]`, bfloat16, W's rows being those of gate and then of up.

    The bits are those of the product, whose gate and up are rounded, and of the activation of it.
    """
    return _launch(x, matrix, LARGE, activation, 0, (x.counted.shape[0], matrix.rows // 2))


def gated_ordered(x: Ordered, matrix: Operand, activation: Activation, unit: int) -> Ordered:
    """The same for a next product with such units, of which rows / 2 is a multiple."""
    shape = (matrix.rows // 2 // STAGE, padded(x.counted.shape[0]), STAGE)
    return Ordered(_launch(x, matrix, LARGE, activation, unit, shape), x.counted, unit)


@cache
def _prepare(matrix: Format, present: frozenset[str], inputs: tuple[mx.Dtype, ...]) -> None:
    """All forms of a format with its first product: a load's short prompt asks for one, requests for all."""
    for form in FORMS:
        kernel(form, present).prepare(inputs, _template(matrix, form, None, 0), [mx.bfloat16])


def _template(matrix: Format, form: Form, activation: Activation | None, ordered: int) -> dict[str, int | bool]:
    return {
        "MODE": matrix.code,
        "GROUP": matrix.group,
        "TILES": form.tiles,
        "COLUMNS": form.columns,
        "GROUPS": form.groups,
        "STAGES": form.stages,
        "DEPTH": form.depth[matrix.bits == 8],
        "ACTIVATION": ACTIVATIONS[activation],
        "ORDERED": ordered,
    }


def _launch(
    x: Ordered, matrix: Operand, form: Form, activation: Activation | None, ordered: int, shape: tuple[int, ...]
) -> mx.array:
    extras = {"biases": matrix.biases, "factors": matrix.factors, "bias": matrix.bias}
    given = {name: array for name, array in extras.items() if array is not None}
    inputs, present = [x.tiles, x.counted, matrix.w, matrix.scales, *given.values()], frozenset(given)
    _prepare(matrix.format, present, tuple(array.dtype for array in inputs))
    blocks = -(-matrix.rows // (form.rows * form.cluster)) * form.cluster
    made: list[mx.array] = kernel(form, present)(
        inputs,
        _template(matrix.format, form, activation, ordered),
        blocks=(-(-x.counted.shape[0] // form.columns), blocks, 1),
        shapes=[shape],
        dtypes=[mx.bfloat16],
    )
    return made[0]
