"""Products of many rows with a packed matrix on GPUs with warpgroups: decoded in registers, nothing of it written."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from arriero.kernels.cuda.formats import Format
from arriero.kernels.cuda.gpu import Gpu
from arriero.kernels.cuda.product import FEW, Operand
from arriero.kernels.cuda.source import Kernel

STAGE = 64
"""Numbers of a row of x that are brought together."""
ROW_THREADS, ROWS_EACH = 256, 4
"""Of the kernel that puts x in order: threads of a block, and rows of each."""
MOST = 65_536
"""Rows of x at most, far beyond any chunk: counts of blocks are small."""
MOST_OF_BYTES = 1536
"""The same in affine formats of 8 bits, where decoding costs more than it saves with more rows (H200, 8192 × 8192: 208
instead of 229 µs with 1,024 rows, 410 instead of 397 with 2,048)."""


@dataclass(frozen=True, slots=True)
class Form:
    """How one launch divides its work."""

    columns: int
    """Rows of x of a block."""
    depth: int
    """Units of each row of W under way."""
    depth_of_bytes: int
    """The same in formats of 8 bits, whose units are half as long."""
    groups: int = 2
    """Warpgroups, each of which has 64 rows of W."""
    stages: int = 8
    """Of 64 numbers of each row of x."""
    cluster: int = 1
    """Blocks that share the reading of x."""
    batch: int = 2
    """Times 32 numbers that are decoded while as many are multiplied: 2, or 1 where a row is an odd number of 64."""
    start: int = 0
    block: int = 0
    """What a launch costs and each block of a multiprocessor, measured: microseconds at 8,192 columns."""

    @property
    def rows(self) -> int:
        """Rows of W of a block."""
        return 64 * self.groups

    @property
    def threads(self) -> int:
        """Those that multiply and one warp that copies, or a warpgroup where it gives its registers to the others."""
        return 128 * self.groups + (128 if self.groups > 1 else 32)

    @property
    def shared(self) -> int:
        """Bytes of shared memory: barriers, stages of x, and what aligning them may take."""
        return 2 * 1024 + self.stages * self.columns * STAGE * 2


LARGE = Form(256, depth=2, depth_of_bytes=4, stages=6, cluster=2, block=85)
WIDE = Form(128, depth=2, depth_of_bytes=4, groups=3, block=72)
MIDDLE = Form(256, depth=3, depth_of_bytes=6, groups=1, stages=6, block=53)
SMALL = Form(64, depth=6, depth_of_bytes=6, groups=1, start=12, block=18)
FORMS = (LARGE, WIDE, MIDDLE, SMALL)
MOST_COLUMNS = 256
"""Of a block of any form."""


def form_for(gpu: Gpu, count: int, rows: int) -> Form:
    """The form for `count` rows of x and `rows` of W: what should take the least time."""

    def cost(form: Form) -> int:
        blocks = -(-count // form.columns) * -(-rows // form.rows)
        return form.start + -(-blocks // gpu.multiprocessors) * form.block

    return min(FORMS, key=cost)


def takes(gpu: Gpu, x: mx.array, matrix: Operand | None) -> bool:
    """Whether `multiply` computes this, and not slower than the product of the decoded matrix: more than `FEW` bfloat16
    rows on a GPU of compute capability 9.0."""
    return (
        matrix is not None
        and gpu.capability == (9, 0)
        and matrix.experts == 0
        and x.dtype == mx.bfloat16
        and x.shape[-1] == matrix.columns
        and FEW
        < x.size // matrix.columns
        <= (MOST_OF_BYTES if matrix.format.affine and matrix.format.bits == 8 else MOST)
    )


@cache
def rows_kernel() -> Kernel:
    """The kernel that puts x in order."""
    return Kernel(
        name="prompt_rows",
        inputs=("x",),
        outputs=("out",),
        headers=("numbers", "formats"),
        body="prompt_rows_body",
        threads=ROW_THREADS,
    )


@cache
def kernel(form: Form, present: frozenset[str]) -> Kernel:
    """The kernel of a form, for matrices that have what `present` names."""
    optional = ("biases", "factors", "bias", "residual")
    return Kernel(
        name="prompt_product",
        inputs=("x", "counted", "w", "scales", *(name for name in optional if name in present)),
        outputs=("out",),
        headers=("numbers", "formats", "warpgroup", "prompt_product"),
        body="prompt_product_body",
        threads=form.threads,
        shared=form.shared,
        defines=(
            ("CLUSTER", str(form.cluster)),
            *((name.upper(), name if name in present else "nullptr") for name in optional),
        ),
    )


def multiply(
    gpu: Gpu, x: mx.array, matrix: Operand, residual: mx.array | None = None, *, form: Form | None = None
) -> mx.array:
    """`x @ Wᵀ (+ bias) (+ residual)` for bfloat16 x `[..., columns]` that `takes` accepted, in bfloat16.

    A row's numbers are summed in the same order whatever the form, so its result is the same beside any others. The
    residual is added to the product as it would be kept.
    """
    rows = x.reshape(-1, matrix.columns)
    y = _launch(order(rows, matrix.format), rows, matrix, residual, form or form_for(gpu, rows.shape[0], matrix.rows))
    return y if x.ndim == 2 else y.reshape(*x.shape[:-1], matrix.rows)


def order(rows: mx.array, matrix: Format) -> mx.array:
    """Rows of x as the products read them, `[columns / 64, padded rows, 64]`, in whole blocks of every form."""
    count, columns = rows.shape
    padded = -(-count // MOST_COLUMNS) * MOST_COLUMNS
    return rows_kernel()(
        [rows],
        {"UNIT": matrix.unit},
        blocks=(-(-columns // 8 // ROW_THREADS), padded // ROWS_EACH, 1),
        shapes=[(columns // STAGE, padded, STAGE)],
        dtypes=[mx.bfloat16],
    )[0]


@cache
def _prepare(matrix: Format, odd: bool, present: frozenset[str], inputs: tuple[mx.Dtype, ...]) -> None:
    """All forms of a format with its first product: a load's short prompt asks for one, requests for all."""
    for form in FORMS:
        kernel(form, present).prepare(inputs, _template(matrix, odd, form), [mx.bfloat16])


def _template(matrix: Format, odd: bool, form: Form) -> dict[str, int | bool]:
    """Of a format, an `odd` number of stages of each row, and a form."""
    return {
        "MODE": matrix.code,
        "GROUP": matrix.group,
        "COLUMNS": form.columns,
        "GROUPS": form.groups,
        "STAGES": form.stages,
        "DEPTH": form.depth if matrix.bits == 4 else form.depth_of_bytes,
        "BATCH": 1 if odd else form.batch,
    }


def _launch(tiles: mx.array, rows: mx.array, matrix: Operand, residual: mx.array | None, form: Form) -> mx.array:
    extras = {"biases": matrix.biases, "factors": matrix.factors, "bias": matrix.bias, "residual": residual}
    given = {name: array for name, array in extras.items() if array is not None}
    inputs, present = [tiles, rows, matrix.w, matrix.scales, *given.values()], frozenset(given)
    odd = bool(matrix.columns // STAGE % 2)
    _prepare(matrix.format, odd, present, tuple(array.dtype for array in inputs))
    count = rows.shape[0]
    blocks = -(-matrix.rows // (form.rows * form.cluster)) * form.cluster
    made: list[mx.array] = kernel(form, present)(
        inputs,
        _template(matrix.format, odd, form),
        blocks=(-(-count // form.columns), blocks, 1),
        shapes=[(count, matrix.rows)],
        dtypes=[mx.bfloat16],
    )
    return made[0]
