"""Products of few rows with a packed matrix, and what goes with them in one launch."""

from __future__ import annotations

import logging
import struct
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeGuard

import mlx.core as mx

from arriero.kernels.cuda import stream
from arriero.kernels.cuda.formats import FORMATS, Format
from arriero.kernels.cuda.gpu import Gpu
from arriero.kernels.cuda.source import Kernel, argument

log = logging.getLogger(__name__)

WARPS = 16
TILE = 16
"""Rows of W in one tile."""
BUCKETS = (1, 4, 8, 16)
"""Rows of x that kernels are compiled for; fewer are padded with zeros in shared memory. Four only where eight don't
fit."""
FEW = 32
"""The most rows that are multiplied this way, by several launches: from then on decoding the matrix once pays."""

Activation = Literal["silu", "gelu_tanh", "gelu"]
ACTIVATIONS: dict[str | None, int] = {None: 0, "silu": 1, "gelu_tanh": 2, "gelu": 3}

Norm = tuple[mx.array, float]
"""A gain and an epsilon."""


@dataclass(frozen=True, eq=False, slots=True)
class Operand:
    """A packed matrix `[rows, columns]`, or a bank of `experts` of them, as the kernels take it."""

    w: mx.array
    scales: mx.array
    biases: mx.array | None
    format: Format
    rows: int
    columns: int
    factors: mx.array | None = None
    """Float32, one for each row of a matrix or for each expert of a bank."""
    bias: mx.array | None = None
    """Bfloat16 `[rows]`."""
    experts: int = 0


def operand(
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    *,
    mode: str,
    bits: int,
    group_size: int,
    global_scale: mx.array | None = None,
    bias: mx.array | None = None,
    ragged: bool = False,
) -> Operand | None:
    """None for a format, a shape or a type of scales that the kernels don't take.

    With `ragged` rows may end in quarters of a unit, which only kernels of experts take.
    """
    found = FORMATS.get((mode, bits, group_size))
    if found is None or w.ndim not in (2, 3) or w.dtype != mx.uint32:
        return None
    rows, columns = w.shape[-2], w.shape[-1] * 32 // bits
    if rows % TILE or columns % (found.unit // 4 if ragged else found.unit):
        return None
    if found.affine and (biases is None or scales.dtype != mx.bfloat16 or biases.dtype != mx.bfloat16):
        return None
    if bias is not None and bias.dtype != mx.bfloat16:
        return None
    experts = w.shape[0] if w.ndim == 3 else 0
    factors = None if global_scale is None else _factors(global_scale, experts or rows)
    return Operand(w, scales, biases if found.affine else None, found, rows, columns, factors, bias, experts)


_FACTORS: dict[tuple[int, int], tuple[mx.array, mx.array]] = {}


def _factors(global_scale: mx.array, count: int) -> mx.array:
    """A global scale as `count` numbers on the device, made once: the array that it is made of is kept beside it."""
    key = (id(global_scale), count)
    if key not in _FACTORS:
        # An element-wise operation on a broadcast array gives one number with strides of 0, and every launch a copy.
        made = argument(mx.contiguous(mx.broadcast_to(global_scale.astype(mx.float32).reshape(-1), (count,))))
        mx.eval(made)
        _FACTORS[key] = (global_scale, made)
    return _FACTORS[key][1]


@dataclass(frozen=True, slots=True)
class Geometry:
    """How one launch divides its work."""

    rows: int
    """Of x, as compiled."""
    depth: int
    tiles: int
    buffers: int
    shared: int


@cache
def geometry(bucket: int, rows: int, columns: int, unit: int, gated: bool, blocks: int, warps: int = WARPS) -> Geometry:
    """For `bucket` rows of x and a matrix `[rows, columns]`, on `blocks` multiprocessors.

    Two or three tiles a step, so that the steps come out even; DEPTH divides a warp's units, so that the epilogue is
    compiled once.
    """
    count = rows // TILE
    tiles = 2 if gated or count <= 2 * blocks or count > 3 * blocks else 3
    depth = depth_of(columns, unit, tiles, warps)
    buffers = 2 if -(-count // tiles) > blocks else 1
    shared = bucket * columns * 2 + buffers * warps * -(-bucket // 8) * tiles * 512 + 64 + 16 * warps * 4
    return Geometry(bucket, depth, tiles, buffers, shared)


def warps_for(columns: int, unit: int) -> int:
    """Warps that share out a row's units: 16, or 20 or 14 where that is more even by an eighth."""
    units = columns // unit
    uneven = {warps: -(-units // warps) * warps / units for warps in (WARPS, 20, 14)}
    return next((warps for warps in (20, 14) if uneven[WARPS] >= 1.125 * uneven[warps] and units >= WARPS), WARPS)


def depth_of(columns: int, unit: int, tiles: int, warps: int) -> int:
    """Units of each row that a thread keeps in flight: at most what registers hold, a divisor of a warp's share."""
    share = -(-(columns // unit) // warps)
    return max(d for d in (1, 2, 3) if share % d == 0 and d * tiles <= 6)


def bucket_for(gpu: Gpu, count: int, rows: int, columns: int, unit: int, gated: bool) -> int:
    """How many of `count` rows one launch takes at most, by what shared memory holds of x; 0 when not even one."""
    warps = warps_for(columns, unit)
    fitting = [
        bucket
        for bucket in BUCKETS
        if geometry(bucket, rows, columns, unit, gated, gpu.multiprocessors, warps).shared <= gpu.shared_memory
    ]
    if 8 in fitting:
        fitting.remove(4)
    return next((bucket for bucket in fitting if bucket >= count), max(fitting, default=0))


def fits(matrix: Operand | None, gpu: Gpu, count: int, *, gated: bool = False) -> TypeGuard[Operand]:
    """Whether `multiply` takes `count` bfloat16 rows and this matrix."""
    return (
        matrix is not None
        and matrix.experts == 0
        and 0 < count <= FEW
        and not (gated and matrix.rows % (2 * TILE))
        and bucket_for(gpu, count, matrix.rows, matrix.columns, matrix.format.unit, gated) > 0
    )


@dataclass(frozen=True, slots=True)
class Product:
    """Results of a product."""

    y: mx.array
    x: mx.array
    """What was multiplied, before its norm: the sum with the branch where there is one."""


def multiply(
    gpu: Gpu,
    x: mx.array,
    matrix: Operand,
    *,
    branch: mx.array | None = None,
    norm: Norm | None = None,
    activation: Activation | None = None,
    residual: mx.array | None = None,
) -> Product:
    """`norm(x + branch) @ Wᵀ (+ bias) (+ residual)` for bfloat16 rows x `[T, columns]` that `fits` accepted.

    With an activation W's rows are those of gate and of up, and y is `activation(gate) · up`. y is bfloat16.
    """
    count = x.shape[0]
    gated = activation is not None
    most = bucket_for(gpu, count, matrix.rows, matrix.columns, matrix.format.unit, gated)
    parts: list[Product] = []
    for start in range(0, count, most):
        part = slice(start, start + most)
        alone = count <= most
        parts.append(
            _launch(
                gpu,
                x if alone else x[part],
                matrix,
                branch if alone or branch is None else branch[part],
                norm,
                activation,
                residual if alone or residual is None else residual[part],
                most,
            )
        )
    if len(parts) == 1:
        return parts[0]
    total = x if branch is None else mx.concatenate([part.x for part in parts])
    return Product(mx.concatenate([part.y for part in parts]), total)


OPTIONAL = {
    "branch": "BRANCH",
    "gain": "GAIN",
    "factors": "FACTORS",
    "bias": "BIAS",
    "residual": "RESIDUAL",
    "chosen": "CHOSEN",
}
"""Arguments that a product may lack, and the names that its body uses for them."""


@cache
def kernel(
    present: frozenset[str], shared: int, warps: int = WARPS, resident: int = 1, *, streamed: bool = False
) -> Kernel:
    """The kernel with these optional arguments; a branch brings the sum as a second output."""
    given = [name for name in ("biases", *OPTIONAL) if name in present]
    defines = [(macro, name if name in present else "nullptr") for name, macro in OPTIONAL.items()]
    defines += [("BIASES", "biases" if "biases" in present else "nullptr")]
    defines += [("SUM", "total" if "branch" in present else "nullptr")]
    return Kernel(
        name="product",
        inputs=("x", "w", "scales", *given),
        outputs=("out", "total") if "branch" in present else ("out",),
        headers=("numbers", "formats", "product", *(["stream"] if streamed else [])),
        body="stream_body" if streamed else "product_body",
        threads=warps * 32,
        shared=shared,
        defines=tuple(defines),
        resident=resident,
    )


def bits_of(number: float) -> int:
    """A float32's bits as the int that a template takes."""
    found: int = struct.unpack("<i", struct.pack("<f", number))[0]
    return found


def _launch(
    gpu: Gpu,
    x: mx.array,
    matrix: Operand,
    branch: mx.array | None,
    norm: Norm | None,
    activation: Activation | None,
    residual: mx.array | None,
    bucket: int,
) -> Product:
    count, gated = x.shape[0], activation is not None
    shape = stream.Shape(matrix.rows, matrix.columns, gated, branch is None and norm is None)
    plan = stream.plan_alone(gpu, shape, count) if stream.takes(matrix.format, count) else None
    if plan is None:
        # All launches of one product share a kernel but the last, which may need fewer rows.
        bucket = min(bucket, bucket_for(gpu, count, matrix.rows, matrix.columns, matrix.format.unit, gated))
        warps = warps_for(matrix.columns, matrix.format.unit)
        layout = geometry(bucket, matrix.rows, matrix.columns, matrix.format.unit, gated, gpu.multiprocessors, warps)
    extras = {
        "biases": matrix.biases,
        "branch": branch,
        "gain": None if norm is None else norm[0],
        "factors": matrix.factors,
        "bias": matrix.bias,
        "residual": residual,
    }
    present = {name: array for name, array in extras.items() if array is not None}
    width = matrix.rows // 2 if gated else matrix.rows
    shapes, dtypes = [(count, width)], [mx.bfloat16]
    if branch is not None:
        shapes.append((count, matrix.columns))
        dtypes.append(mx.bfloat16)
    numbers: dict[str, int | bool] = {
        "ACTIVATION": ACTIVATIONS[activation],
        "NORM": norm is not None,
        "WIDE_GAIN": norm is not None and norm[0].dtype == mx.float32,
        "EPS_BITS": 0 if norm is None else bits_of(norm[1]),
    }
    if plan is None:
        launch = kernel(frozenset(present), layout.shared, warps)
        numbers = {**template(matrix, layout), **numbers, "EXPERTS": False, "SHARED_BY": 1}
    else:
        launch = kernel(frozenset(present), plan.shared, streamed=True)
        numbers |= {"N_": matrix.rows, "K_": matrix.columns, "ROWS": plan.rows, "PLACES": stream.PLACES}
        numbers |= plan.parts[0].template()
    made = launch(
        [x, matrix.w, matrix.scales, *present.values()],
        numbers,
        blocks=(gpu.multiprocessors, 1, 1),
        shapes=shapes,
        dtypes=dtypes,
    )
    return Product(made[0], x if branch is None else made[1])


def template(matrix: Operand, plan: Geometry) -> dict[str, int | bool]:
    """What the matrix and the geometry decide of a kernel's template."""
    return {
        "MODE": matrix.format.code,
        "GROUP": matrix.format.group,
        "N_": matrix.rows,
        "K_": matrix.columns,
        "ROWS": plan.rows,
        "DEPTH": plan.depth,
        "TILES": plan.tiles,
        "BUFFERS": plan.buffers,
    }
