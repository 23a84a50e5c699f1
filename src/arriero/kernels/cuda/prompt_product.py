"""Products of many rows with a packed matrix on GPUs with warpgroups: decoded in registers, nothing of it written."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import mlx.core as mx

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
        headers=("numbers", "formats"),
        body="prompt_rows_body",
        threads=ROW_THREADS,
    )


@cache
def kernel(form: Form, present: frozenset[str]) -> Kernel:
    """The kernel of a form, for matrices that have what `present` names."""
    optional = ("biases", "factors", "bias")
    return Kernel(
        name="prompt_product",
        inputs=("x", "rows", "w", "scales", *(name for name in optional if name in present)),
        outputs=("out",),
        headers=("numbers", "formats", "product", "warpgroup", "prompt_product"),
        body="prompt_product_body",
        threads=form.threads,
        shared=form.shared,
        defines=(
            ("CLUSTER", str(form.cluster)),
            *((name.upper(), name if name in present else "nullptr") for name in optional),
        ),
    )


def multiply(
    gpu: Gpu, x: mx.array, matrix: Operand, form: Form | None = None, *, activation: Activation | None = None
) -> mx.array:
    """`x @ Wᵀ (+ bias)` for bfloat16 x `[..., columns]` that `takes` accepted, in bfloat16.

    A row's numbers are summed in the same order whatever the form, so its result is the same beside any others. With an
    activation, which only `LARGE` takes, W's rows are those of gate and of up and it is `activation(gate) · up`.
    """
    rows = x.reshape(-1, matrix.columns)
    count = rows.shape[0]
    chosen = form or (LARGE if activation is not None else form_for(gpu, count, matrix.rows))
    padded = -(-count // chosen.columns) * chosen.columns
    prepared = rows_kernel()(
        [rows],
        {"UNIT": matrix.format.unit},
        blocks=(-(-matrix.columns // 8 // ROW_THREADS), padded, 1),
        shapes=[(matrix.columns // STAGE, padded, STAGE)],
        dtypes=[mx.bfloat16],
    )[0]
    extras = {"biases": matrix.biases, "factors": matrix.factors, "bias": matrix.bias}
    present = {name: array for name, array in extras.items() if array is not None}
    width = matrix.rows if activation is None else matrix.rows // 2
    y = kernel(chosen, frozenset(present))(
        [prepared, rows, matrix.w, matrix.scales, *present.values()],
        {
            "MODE": matrix.format.code,
            "GROUP": matrix.format.group,
            "TILES": chosen.tiles,
            "COLUMNS": chosen.columns,
            "GROUPS": chosen.groups,
            "STAGES": chosen.stages,
            "DEPTH": chosen.depth[matrix.format.bits == 8],
            "ACTIVATION": ACTIVATIONS[activation],
        },
        blocks=(padded // chosen.columns, -(-matrix.rows // (chosen.rows * chosen.cluster)) * chosen.cluster, 1),
        shapes=[(count, width)],
        dtypes=[mx.bfloat16],
    )[0]
    return y if x.ndim == 2 else y.reshape(*x.shape[:-1], width)
