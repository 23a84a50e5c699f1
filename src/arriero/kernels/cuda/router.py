"""The router of a mixture of experts and what stands before it, in one launch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from arriero.kernels.cuda.gpu import Gpu
from arriero.kernels.cuda.product import Norm, bits_of
from arriero.kernels.cuda.source import Kernel, argument

WARPS = 8
BUCKETS = (1, 8, 16, 32)
"""Rows of x that kernels are compiled for."""
MOST_EXPERTS = 1024
MOST_CHOSEN = 31
"""One for each thread of a warp, and one for what every token takes."""


@dataclass(frozen=True, eq=False, slots=True)
class Routed:
    """Experts uint32 and their weights float32, `[T, k]`; what they take, and what they are added to, `[T, hidden]`."""

    chosen: mx.array
    weights: mx.array
    normed: mx.array
    total: mx.array


def shared_bytes(bucket: int, columns: int) -> int:
    """Shared memory of a block."""
    return bucket * columns * 2 + bucket * WARPS * 4


def bucket_for(gpu: Gpu, count: int, columns: int) -> int:
    """The rows of x that a kernel is compiled for; 0 when shared memory does not hold `count` rows."""
    fitting = [b for b in BUCKETS if b >= count and shared_bytes(b, columns) <= gpu.shared_memory]
    return min(fitting, default=0)


def fits(gpu: Gpu, x: mx.array, w: mx.array, top: int, one: mx.array | None, bias: mx.array | None = None) -> bool:
    """Whether `route` takes rows x `[T, hidden]` and a router w `[experts, hidden]`."""
    return (
        x.dtype == w.dtype == mx.bfloat16
        and all(array.dtype == mx.bfloat16 for array in (one, bias) if array is not None)
        and w.shape[0] <= MOST_EXPERTS
        and top <= min(MOST_CHOSEN, w.shape[0])
        and w.shape[1] % 8 == 0
        and bucket_for(gpu, x.shape[0], w.shape[1]) > 0
    )


@cache
def _counter() -> mx.array:
    """A zero that each launch leaves zero."""
    made = argument(mx.zeros((8,), mx.uint32))
    mx.eval(made)
    return made


@cache
def _kernel(branch: bool, normed: bool, one: bool, biased: bool, shared: int) -> Kernel:
    given = {"branch": branch, "gain": normed, "more": one, "bias": biased}
    return Kernel(
        name="router",
        inputs=("x", "w", "arrived", *(name for name, there in given.items() if there)),
        outputs=(
            *("chosen", "weights", "scores"),
            *(("total",) if branch else ()),
            *(("normed",) if normed else ()),
        ),
        headers=("numbers", "router"),
        body="router_body",
        threads=32 * WARPS,
        shared=shared,
        defines=(
            *((name.upper(), name if there else "nullptr") for name, there in given.items()),
            ("SUM", "total" if branch else "nullptr"),
            ("NORMED", "normed" if normed else "nullptr"),
        ),
    )


def route(
    gpu: Gpu,
    x: mx.array,
    w: mx.array,
    top: int,
    *,
    normalise: bool,
    branch: mx.array | None = None,
    norm: Norm | None = None,
    one: mx.array | None = None,
    bias: mx.array | None = None,
) -> Routed:
    """The `top` experts of `norm(x + branch)` by their softmax, the best first, equal ones by their numbers.

    `bias` `[experts]`, bfloat16, is added to the scores before.

    With `normalise` the weights of those chosen sum to one. Where there is `one` `[1, hidden]`, the number of experts
    is a last choice, with the sigmoid of its product as weight. Scores are float32.
    """
    count, (experts, columns) = x.shape[0], w.shape
    bucket = bucket_for(gpu, count, columns)
    extras = [array for array in (branch, None if norm is None else norm[0], one, bias) if array is not None]
    every, per = experts + (one is not None), top + (one is not None)
    wide = [(count, columns)] * ((branch is not None) + (norm is not None))
    chosen, weights, _, *rest = _kernel(
        branch is not None, norm is not None, one is not None, bias is not None, shared_bytes(bucket, columns)
    )(
        [x, w, _counter(), *extras],
        {
            "EXPERTS_": experts,
            "GATED_ONE": int(one is not None),
            "TOP": top,
            "NORMALISE": normalise,
            "K_": columns,
            "ROWS": bucket,
            "WIDE_GAIN": norm is not None and norm[0].dtype == mx.float32,
            "EPS_BITS": bits_of(0.0 if norm is None else norm[1]),
        },
        blocks=(-(-every // WARPS), 1, 1),
        shapes=[(count, per), (count, per), (count * every,), *wide],
        dtypes=[mx.uint32, mx.float32, mx.float32, *[mx.bfloat16] * len(wide)],
    )
    total = x if branch is None else rest[0]
    return Routed(chosen, weights, total if norm is None else rest[-1], total)
