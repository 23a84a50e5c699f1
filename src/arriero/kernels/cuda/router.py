"""The router of a mixture of experts and what stands before it, in one launch."""

from __future__ import annotations

from collections.abc import Iterable
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


@dataclass(frozen=True, eq=False, slots=True)
class Choice:
    """How logits become choices and weights."""

    top: int
    """Experts of a token."""
    normalise: bool
    """Whether the weights of those chosen sum to one, before `scale`."""
    scale: float = 1.0
    correction: mx.array | None = None
    """Float32 `[experts]`: experts are weighed by the sigmoid of their logits, and chosen by that and the correction.
    None: by softmax."""
    groups: int = 1
    top_groups: int = 1
    """Of `groups`, those that a token's experts come from; only with a correction."""
    whole: bool = False
    """Whether the number of experts is a last choice of weight 1, for what every token takes as it is."""

    def template(self, experts: int, gated: bool) -> dict[str, int | bool]:
        """What it decides of a kernel that chooses; `gated`: what every token takes has a logit."""
        return {
            "EXPERTS_": experts,
            "ONE_": 2 if self.whole else int(gated),
            "TOP": self.top,
            "NORMALISE": self.normalise,
            "SIGMOID": self.correction is not None,
            "GROUPS": self.groups,
            "TOP_GROUPS": self.top_groups,
            "SCALE_BITS": bits_of(self.scale),
        }

    def fits(self, experts: int, gated: bool) -> bool:
        """Whether the kernels choose so."""
        grouped = self.top_groups < self.groups
        return (
            0 < self.top <= min(MOST_CHOSEN, experts)
            and not (self.whole and gated)
            and experts % self.groups == 0
            and not (grouped and (self.correction is None or self.groups > 32 or experts // self.groups < 2))
        )


def shared_bytes(bucket: int, columns: int) -> int:
    """Shared memory of a block."""
    return bucket * columns * 2 + bucket * WARPS * 4


def bucket_for(gpu: Gpu, count: int, columns: int) -> int:
    """The rows of x that a kernel is compiled for; 0 when shared memory does not hold `count` rows."""
    fitting = [b for b in BUCKETS if b >= count and shared_bytes(b, columns) <= gpu.shared_memory]
    return min(fitting, default=0)


def fits(
    gpu: Gpu, x: mx.array, w: mx.array, choice: Choice, one: mx.array | None, bias: mx.array | None = None
) -> bool:
    """Whether `route` takes rows x `[T, hidden]` and a router w `[experts, hidden]`."""
    return (
        x.dtype == w.dtype == mx.bfloat16
        and all(array.dtype == mx.bfloat16 for array in (one, bias) if array is not None)
        and w.shape[0] <= MOST_EXPERTS
        and choice.fits(w.shape[0], one is not None)
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
def _kernel(given: tuple[tuple[str, bool], ...], shared: int) -> Kernel:
    there = dict(given)
    wide = [name for name, by in (("total", "branch"), ("normed", "gain")) if there[by]]
    return Kernel(
        name="router",
        inputs=("x", "w", "arrived", *(name for name, present in given if present)),
        outputs=("chosen", "weights", "scores", *wide),
        headers=("numbers", "router"),
        body="router_body",
        threads=32 * WARPS,
        shared=shared,
        defines=tuple(placed(given).items()),
    )


def placed(given: Iterable[tuple[str, bool]]) -> dict[str, str]:
    """What stands in a body for arguments that may be missing, and for what they bring about."""
    there = dict(given)
    made = {name.upper(): name if present else "nullptr" for name, present in there.items()}
    return made | {
        "SUM": "total" if there["branch"] else "nullptr",
        "NORMED": "normed" if there["gain"] else "nullptr",
        "TAKEN": "normed" if there["gain"] else "total" if there["branch"] else "x",
    }


def route(
    gpu: Gpu,
    x: mx.array,
    w: mx.array,
    choice: Choice,
    *,
    branch: mx.array | None = None,
    norm: Norm | None = None,
    one: mx.array | None = None,
    bias: mx.array | None = None,
) -> Routed:
    """The experts of `norm(x + branch)` by w `[experts, hidden]`, the best first, equal ones by their numbers.

    `bias` `[experts]`, bfloat16, is added to the logits. Where there is `one` `[1, hidden]`, the number of experts is a
    last choice, with the sigmoid of its product as weight. Logits are float32.
    """
    count, (experts, columns) = x.shape[0], w.shape
    bucket = bucket_for(gpu, count, columns)
    extras = optional(branch, norm, one, bias, choice)
    per = choice.top + (one is not None or choice.whole)
    wide = [(count, columns)] * ((branch is not None) + (norm is not None))
    chosen, weights, _, *rest = _kernel(
        tuple((name, array is not None) for name, array in extras.items()), shared_bytes(bucket, columns)
    )(
        [x, w, _counter(), *(array for array in extras.values() if array is not None)],
        {
            **choice.template(experts, one is not None),
            "K_": columns,
            "ROWS": bucket,
            "WIDE_GAIN": norm is not None and norm[0].dtype == mx.float32,
            "EPS_BITS": bits_of(0.0 if norm is None else norm[1]),
        },
        blocks=(-(-(experts + (one is not None)) // WARPS), 1, 1),
        shapes=[(count, per), (count, per), (count * (experts + (one is not None)),), *wide],
        dtypes=[mx.uint32, mx.float32, mx.float32, *[mx.bfloat16] * len(wide)],
    )
    total = x if branch is None else rest[0]
    return Routed(chosen, weights, total if norm is None else rest[-1], total)


def optional(
    branch: mx.array | None, norm: Norm | None, one: mx.array | None, bias: mx.array | None, choice: Choice
) -> dict[str, mx.array | None]:
    """Arguments that may be missing."""
    gain = None if norm is None else norm[0]
    return {"branch": branch, "gain": gain, "more": one, "bias": bias, "correction": choice.correction}
