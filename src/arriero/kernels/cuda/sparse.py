"""A mixture of experts of a few tokens in one launch: sum, norm, router, choice, experts and their weighed sum."""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from arriero.kernels.cuda import router
from arriero.kernels.cuda.gathering import gathered, wanted
from arriero.kernels.cuda.gpu import Gpu
from arriero.kernels.cuda.mixture import Banks, arguments, depth_of, first_arguments, first_template
from arriero.kernels.cuda.product import Norm, bits_of
from arriero.kernels.cuda.router import Choice
from arriero.kernels.cuda.source import Kernel

WARPS = 8
RESIDENT = 2
"""Blocks that a multiprocessor holds at once, at most."""
BUCKETS = (1, 8)
"""Rows of x that kernels are compiled for."""
INNER_DEEPEST, DOWN_DEEPEST = 3, 6
"""Units of each row that a thread keeps in flight at most."""


def shared_bytes(bucket: int, columns: int) -> int:
    """Shared memory of a block: all rows of x, and then the sums of its warps."""
    return max(bucket * columns * 2 + bucket * WARPS * 4, 2 * WARPS * 2 * 16 * 4)


def bucket_for(gpu: Gpu, count: int, columns: int) -> int:
    """The rows of x that a kernel is compiled for; 0 when there are too many."""
    fitting = [b for b in BUCKETS if b >= count and shared_bytes(b, columns) + 2048 <= gpu.shared_memory]
    return min(fitting, default=0)


def fits(
    gpu: Gpu, banks: Banks, x: mx.array, w: mx.array, choice: Choice, one: mx.array | None, bias: mx.array | None
) -> bool:
    """Whether `multiply` takes rows x `[T, hidden]`, and blocks may count in place."""
    return (
        gpu.in_place
        and wanted()
        and bool(banks.one) == (one is not None or choice.whole)
        and bucket_for(gpu, x.shape[0], x.shape[1]) > 0
        and router.fits(gpu, x, w, choice, one, bias)
    )


@cache
def kernel(
    inputs: tuple[str, ...], outputs: tuple[str, ...], defines: tuple[tuple[str, str], ...], shared: int, resident: int
) -> Kernel:
    """The kernel for these arguments."""
    return Kernel(
        name="sparse",
        inputs=inputs,
        outputs=outputs,
        headers=("numbers", "formats", "product", "clamped", "mixture", "router"),
        body="sparse_body",
        threads=32 * WARPS,
        shared=shared,
        defines=defines,
        resident=resident,
        phases=3,
    )


def multiply(
    gpu: Gpu,
    banks: Banks,
    x: mx.array,
    w: mx.array,
    choice: Choice,
    *,
    branch: mx.array | None = None,
    norm: Norm | None = None,
    one: mx.array | None = None,
    bias: mx.array | None = None,
) -> mx.array:
    """`h + Σ weight · expert(norm(h))` with `h = x + branch`, bfloat16; without a branch only the sum.

    Experts and weights are those of `router.route`; sums are float32, and rounded once.
    """
    (count, hidden), (experts, _), inner = x.shape, w.shape, banks.inner
    bucket, unit = bucket_for(gpu, count, hidden), banks.down.format.unit
    shared = shared_bytes(bucket, hidden)
    # Besides, a block has what it has chosen, up to 2 KB, and 1 KB that the device keeps for itself.
    resident = max(1, min(RESIDENT, gpu.shared_memory // (shared + 3072)))
    given = router.optional(branch, norm, one, bias, choice)
    arrays = {"x": x, "w": w, "gathered": gathered(gpu.multiprocessors * resident)}
    arrays |= {name: array for name, array in given.items() if array is not None}
    defines = router.placed((name, array is not None) for name, array in given.items())
    found, macros = first_arguments(banks)
    arrays, defines = arrays | found, defines | macros
    for name, operand, parts in (("D", banks.down, ("W", "S", "B", "BIAS")), ("OD", banks.one_down, ("W", "S", "B"))):
        found, macros = arguments(name, operand, parts)
        arrays, defines = arrays | found, defines | macros
    per, every = choice.top + (one is not None or choice.whole), experts + (one is not None)
    wide = [name for name, there in (("total", branch), ("normed", norm)) if there is not None]
    outputs = ("out", "inner", "scores", *wide)
    made = kernel(tuple(arrays), outputs, tuple(defines.items()), shared, resident)(
        list(arrays.values()),
        {
            "MODE": banks.down.format.code,
            "GROUP": banks.down.format.group,
            **choice.template(experts, one is not None),
            "HIDDEN": hidden,
            "INNER": inner,
            "ROWS": bucket,
            "WIDE_GAIN": norm is not None and norm[0].dtype == mx.float32,
            "EPS_BITS": bits_of(0.0 if norm is None else norm[1]),
            **first_template(banks),
            "INNER_DEPTH": depth_of(-(-hidden // unit), WARPS, INNER_DEEPEST),
            "DOWN_DEPTH": depth_of(per * -(-inner // unit), WARPS, DOWN_DEEPEST),
        },
        blocks=(gpu.multiprocessors * resident, 1, 1),
        shapes=[(count, hidden), (count * per, inner), (count * every,), *[(count, hidden)] * len(wide)],
        dtypes=[mx.bfloat16, mx.bfloat16, mx.float32, *[mx.bfloat16] * len(wide)],
    )
    return made[0]
