"""The products of a layer that follow one another, in one launch.

Each launch costs the host 7 µs and the device 3 to 4 (H200: the gap before it, and the time until its first weights
arrive). Here the blocks wait for one another instead, with the next weights on their way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import mlx.core as mx

from arriero.kernels.cuda import stream
from arriero.kernels.cuda.gathering import gathered
from arriero.kernels.cuda.gpu import Gpu
from arriero.kernels.cuda.product import (
    ACTIVATIONS,
    WARPS,
    Activation,
    Norm,
    Operand,
    bits_of,
    geometry,
    warps_for,
)
from arriero.kernels.cuda.source import Kernel

ROWS = (1, 8)
"""Rows of x that kernels are compiled for."""
STAGES = ("o", "gu", "d", "q")
"""Names of the matrices: attention's output, gate and up, down, and what comes next: queries, keys and values."""


@dataclass(frozen=True, eq=False, slots=True)
class Chain:
    """The matrices of one launch; gate and up are one matrix."""

    gate_up: Operand
    down: Operand
    activation: Activation
    norm: Norm
    out: Operand | None = None
    """Of attention, whose product is the branch."""
    qkv: Operand | None = None
    qkv_norm: Norm | None = None

    def alone(self) -> Chain:
        """The same without what comes next."""
        return replace(self, qkv=None, qkv_norm=None)

    def matrices(self) -> dict[str, Operand]:
        """Those that are there, by their names, in order."""
        found = zip(STAGES, (self.out, self.gate_up, self.down, self.qkv), strict=True)
        return {name: matrix for name, matrix in found if matrix is not None}


@dataclass(frozen=True, slots=True)
class Made:
    """What a launch gives: the stream behind the layer, and the product with `qkv` where there is one."""

    h: mx.array
    qkv: mx.array | None


def bucket_for(gpu: Gpu, chain: Chain, count: int) -> int:
    """How many rows a kernel is compiled for; 0 when `count` rows don't fit one launch."""
    for bucket in ROWS:
        if bucket >= count and _shared(gpu, chain, bucket) <= gpu.shared_memory:
            return bucket
    return 0


def fits(gpu: Gpu, chain: Chain, count: int) -> bool:
    """Whether `multiply` takes so many bfloat16 rows: blocks may count in place, and gains are of one type."""
    norms = [norm for norm in (chain.norm, chain.qkv_norm) if norm is not None]
    return (
        gpu.in_place
        and len({norm[0].dtype for norm in norms}) == 1
        and all(m.experts == 0 and warps_for(m.columns, m.format.unit) == WARPS for m in chain.matrices().values())
        and chain.gate_up.rows % 32 == 0
        and chain.gate_up.rows // 2 == chain.down.columns
        and chain.down.rows == chain.gate_up.columns
        and (chain.out is None or chain.out.rows == chain.gate_up.columns)
        and (chain.qkv is None or (chain.qkv_norm is not None and chain.qkv.columns == chain.down.rows))
        and bucket_for(gpu, chain, count) > 0
    )


def streams(gpu: Gpu, chain: Chain, count: int) -> bool:
    """Whether the weights pass through shared memory for so many rows."""
    return _plan(gpu, chain, count) is not None


def _shared(gpu: Gpu, chain: Chain, bucket: int) -> int:
    return max(
        geometry(bucket, m.rows, m.columns, m.format.unit, name == "gu", gpu.multiprocessors).shared
        for name, m in chain.matrices().items()
    )


def _plan(gpu: Gpu, chain: Chain, count: int) -> stream.Plan | None:
    """How they pass through it."""
    matrices = chain.matrices()
    if not all(stream.takes(m.format, count) for m in matrices.values()):
        return None
    shapes = [stream.Shape(m.rows, m.columns, name == "gu", name in ("o", "d")) for name, m in matrices.items()]
    return stream.plan(gpu, tuple(shapes), count)


@cache
def kernel(stages: tuple[tuple[str, tuple[str, ...]], ...], shared: int, streamed: bool) -> Kernel:
    """The kernel for these stages, each with the optional arguments that its matrix has."""
    names = [name for name, _ in stages]
    inputs, defines = ["h", "y" if "o" in names else "branch", "gain", "gathered"], []
    for name in STAGES:
        had = dict(stages).get(name, ())
        if name in names:
            inputs += [f"{name}_w", f"{name}_scales", *(f"{name}_{part}" for part in had)]
        defines += [
            (f"{name}_{part}".upper(), f"{name}_{part}" if part in had else "nullptr")
            for part in ("biases", "factors", "bias")
        ]
    if "q" in names:
        inputs.append("q_gain")
    outputs = [*(["branch"] if "o" in names else []), "total", "inner", "next", *(["qkv"] if "q" in names else [])]
    return Kernel(
        name="layer",
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        headers=("numbers", "formats", "product", *(["stream"] if streamed else [])),
        body="stream_layer_body" if streamed else "layer_body",
        threads=WARPS * 32,
        shared=shared,
        defines=(*defines, ("WITH_OUT", str(int("o" in names))), ("WITH_QKV", str(int("q" in names)))),
        phases=4,
    )


def multiply(gpu: Gpu, h: mx.array, branch: mx.array, chain: Chain) -> Made:
    """`x = h + branch; x + down(act(gate(norm(x))) · up(norm(x)))` for rows `[T, hidden]`, and qkv of its norm.

    With a matrix `out` the branch is its product with what is given, `[T, columns]`.
    """
    matrices, count = chain.matrices(), h.shape[0]
    flow, bucket = _plan(gpu, chain, count), bucket_for(gpu, chain, count)
    inputs = [h, branch, chain.norm[0], gathered(gpu.multiprocessors)]
    stages: list[tuple[str, tuple[str, ...]]] = []
    template: dict[str, int | bool] = {
        **({"ROWS": bucket} if flow is None else {"ROWS": flow.rows, "PLACES": stream.PLACES}),
        "ACTIVATION": ACTIVATIONS[chain.activation],
        "WIDE_GAIN": chain.norm[0].dtype == mx.float32,
        "EPS_BITS": bits_of(chain.norm[1]),
        "Q_EPS_BITS": 0 if chain.qkv_norm is None else bits_of(chain.qkv_norm[1]),
    }
    for i, (name, m) in enumerate(matrices.items()):
        had = {part: getattr(m, part) for part in ("biases", "factors", "bias") if getattr(m, part) is not None}
        inputs += [m.w, m.scales, *had.values()]
        stages.append((name, tuple(had)))
        numbers: dict[str, int | bool] = {"N": m.rows, "K": m.columns}
        if flow is None:
            plan = geometry(bucket, m.rows, m.columns, m.format.unit, name == "gu", gpu.multiprocessors)
            numbers |= {"MODE": m.format.code, "GROUP": m.format.group}
            numbers |= {"DEPTH": plan.depth, "TILES": plan.tiles, "BUFFERS": plan.buffers}
        else:
            numbers |= flow.parts[i].template()
        template |= {f"{name.upper()}_{what}": number for what, number in numbers.items()}
    if chain.qkv_norm is not None:
        inputs.append(chain.qkv_norm[0])
    hidden = chain.down.rows
    widths = [*([hidden] if chain.out is not None else []), hidden, chain.down.columns, hidden]
    widths += [] if chain.qkv is None else [chain.qkv.rows]
    shared = _shared(gpu, chain, bucket) if flow is None else flow.shared
    made = kernel(tuple(stages), shared, flow is not None)(
        inputs,
        template,
        blocks=(gpu.multiprocessors, 1, 1),
        shapes=[(count, width) for width in widths],
        dtypes=[mx.bfloat16] * len(widths),
    )
    return Made(made[-1], None) if chain.qkv is None else Made(made[-2], made[-1])
