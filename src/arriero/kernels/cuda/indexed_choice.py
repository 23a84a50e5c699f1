"""Which blocks each query reads: scores by the tensor cores, chunk by chunk in one place, and each query's best."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from arriero.kernels.cuda.attention import Launch
from arriero.kernels.cuda.gpu import Gpu
from arriero.kernels.cuda.indexed import launches, padded
from arriero.kernels.cuda.product import bits_of
from arriero.kernels.cuda.source import Kernel, argument
from arriero.kernels.cuda.topk import MOST, power_of_two

HEADS = (1, 2, 4, 8)
"""Numbers of index heads whose sum stays in a warp."""
SCRATCH = 1 << 23
"""Scores that are held at a time: 32 MB stay in the L2 cache of the largest GPUs."""
FEW = 16
"""Queries up to which blocks of threads take four queries and few keys each."""
TILES = {False: (4, 512), True: (1, 128)}
"""Groups of 16 lines and keys of a block of threads, by whether queries are few."""


def takes(q: mx.array, keys: Sequence[mx.array], budget: int) -> bool:
    """Whether `choose` computes this on a GPU whose kernels may write in place.

    Bfloat16, 1, 2, 4 or 8 heads, widths of multiples of 32.
    """
    return (
        q.size > 0
        and q.shape[1] in HEADS
        and q.shape[2] % 32 == 0
        and q.shape[2] <= 256
        and budget <= MOST
        and all(x.dtype == mx.bfloat16 and x.shape[0] > 0 for x in (q, *keys))
    )


@cache
def scores_kernel(rows: int, by_query: bool, again: bool = False) -> Kernel:
    """Scores for the keys of 1 or `ROWS` rows; `by_query`: of one query each, and the keys lie in their caches.

    `again` writes where scores lie that nobody needs any more.
    """
    return Kernel(
        name="indexed_scores",
        inputs=("q", "groups", *(("held", "after") if again else ()), *(f"k{i}" for i in range(rows))),
        outputs=("scores",),
        headers=("numbers", "strided", "indexed_scores"),
        body="indexed_scores_few_body" if by_query else "indexed_scores_body",
        threads=128,
        defines=(("BUFFERED_ROWS", str(rows)), ("TARGET", "held" if again else "scores")),
        contiguous=False,
    )


@cache
def choice_kernel(threads: int, again: bool = False) -> Kernel:
    """The best of each row of scores; `again`: of those that were written where others lay."""
    return Kernel(
        name="indexed_choice",
        inputs=("scores", "queries", *(("after",) if again else ())),
        outputs=("out",),
        headers=("numbers", "strided", "topk"),
        body="indexed_choice_body",
        threads=threads,
    )


def groups(
    lengths: Sequence[int], positions: Sequence[int], block: int, together: int, first: int, end: int
) -> np.ndarray:
    """int32 `[groups, 4]`, as indexed_scores.cu names them, of queries `[first, end)` on the axis of these spans."""
    lines: list[tuple[int, int, int, int]] = []
    start = 0
    for row, (length, position) in enumerate(zip(lengths, positions, strict=True)):
        low, high = max(first, start), min(end, start + length)
        for at in range(low, high, together):
            count = min(together, high - at)
            seen = (position + at + count - start) // block
            lines.append((at - first, count, row, seen))
        start += length
    return np.array(lines, np.int32).reshape(-1, 4)


def choose(
    gpu: Gpu,
    q: mx.array,
    keys: Sequence[mx.array],
    *,
    scale: float,
    lengths: Sequence[int],
    positions: Sequence[int],
    block: int,
    budget: int,
    memo: dict[Any, Any],
) -> mx.array:
    """`kernels/block_select.py` for what `takes` accepted: block numbers int32 `[T, budget]`."""
    heads, width = q.shape[1:]
    q = mx.contiguous(q)
    outputs: list[mx.array] = []
    start = 0
    for launch in launches(lengths, positions, memo):
        spans = slice(launch.first, launch.first + launch.rows)
        k = padded(keys[spans])
        furthest = max((p + n) // block for p, n in zip(positions[spans], lengths[spans], strict=True))
        count, tile = TILES[launch.tokens <= FEW]
        tiles = max(1, -(-furthest // tile))
        chunk = max(16, SCRATCH // (tiles * tile) // 16 * 16)
        held: mx.array | None = None
        for first in range(0, launch.tokens, chunk):
            end = min(first + chunk, launch.tokens)
            key = ("cuda groups of queries", tuple(lengths), tuple(positions), block, heads, start + first)
            of: tuple[int, mx.array] | None = memo.get(key)
            if of is None:
                table = groups(lengths[spans], positions[spans], block, count * 16 // heads, first, end)
                of = memo[key] = len(table), argument(mx.array(table))
            # One chunk's scores lie where those before lay, once the best of those are chosen.
            again = held is not None
            made = scores_kernel(len(k), False, again)(
                [q[start + first : start + end], of[1], *(() if held is None else (held, outputs[-1])), *k],
                _template(heads, width, block, scale, launch.tokens),
                blocks=(tiles, of[0], 1),
                shapes=[(8,) if again else (end - first, tiles * tile)],
                dtypes=[mx.float32],
            )[0]
            held = made if held is None else held
            outputs.append(
                _best(
                    gpu,
                    held,
                    launch.groups[8 * first :],
                    block,
                    budget,
                    count=end - first,
                    after=made if again else None,
                )
            )
        start += launch.tokens
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)


def choose_few(
    gpu: Gpu,
    launch: Launch,
    q: mx.array,
    caches: Sequence[mx.array],
    *,
    scale: float,
    block: int,
    budget: int,
) -> mx.array:
    """One launch of groups of one query, whose row's keys stand in its cache `[1, 1, capacity, width]`.

    The key of a block is the row of its last token. Nothing but the launch's table depends on positions.
    """
    heads, width = q.shape[1:]
    k = padded(caches)
    tile = TILES[True][1]
    tiles = -(-max(cache.shape[2] for cache in caches) // block // tile)
    scores = scores_kernel(len(k), True)(
        [q, launch.groups, *k],
        _template(heads, width, block, scale, 1),
        blocks=(tiles, launch.count, 1),
        shapes=[(launch.tokens, tiles * tile)],
        dtypes=[mx.float32],
    )[0]
    return _best(gpu, scores, launch.groups, block, budget, count=launch.tokens)


def _template(heads: int, width: int, block: int, scale: float, queries: int) -> dict[str, int]:
    count, tile = TILES[queries <= FEW]
    how = {"W_": width, "H_": heads, "GROUPS": count, "KEYS": tile, "BLOCK_": block}
    return {**how, "SCALE_BITS": bits_of(scale)}


def _best(
    gpu: Gpu,
    scores: mx.array,
    queries: mx.array,
    block: int,
    budget: int,
    *,
    count: int,
    after: mx.array | None = None,
) -> mx.array:
    """Of the first `count` rows of scores, once `after` is computed."""
    made = choice_kernel(1024 if count <= gpu.multiprocessors else 256, after is not None)(
        [scores, queries, *(() if after is None else (after,))],
        {"BLOCK_": block, "BUDGET": budget, "SORTED": power_of_two(budget)},
        blocks=(count, 1, 1),
        shapes=[(count, budget)],
        dtypes=[mx.int32],
    )
    return made[0]
