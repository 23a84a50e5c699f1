"""Which blocks of keys each query reads: the choice that indexed attention makes before it attends.

A query at position t sees `(t + 1) // block` complete blocks; the block that it completes competes like any other and
may lose. Where they are no more than the budget, all are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from arriero.kernels import device
from arriero.kernels.cuda import indexed_choice as cuda
from arriero.kernels.spans import joined
from arriero.kernels.topk import top_k

PRODUCT_BUDGET = 1 << 24
"""Products of queries and keys (all heads) that plain MLX holds at a time."""


def block_select(
    q: mx.array,
    keys: Sequence[mx.array],
    *,
    scale: float,
    lengths: Sequence[int],
    positions: Sequence[int],
    block: int,
    budget: int,
    memo: dict[Any, Any] | None = None,
) -> mx.array:
    """Block numbers int32 `[T, budget]` for index queries q `[T, H, D]`: rising, then −1.

    `lengths[i]` rows of q belong to span i, whose first stands at absolute position `positions[i]`. `keys[i]`
    `[blocks, D]` holds the key of each complete block of span i, at least as many as its last query sees. A block
    scores `scale · Σ_heads max(0, q·k)` in float32; the `budget` best of the visible ones are chosen, of equal ones the
    lower. Queries whose visible blocks all fit need no scores: `dense_until` says up to where. `memo` is what the
    layers of one forward share.
    ValueError for shapes that don't fit.
    """
    if sum(lengths) != q.shape[0] or len(lengths) != len(keys) or len(positions) != len(keys):
        raise ValueError(f"{len(keys)} spans of {list(lengths)} queries, but {q.shape[0]} were given")
    if block < 1 or budget < 1:
        raise ValueError(f"a budget of {budget} blocks of {block} tokens selects nothing")
    for k, length, position in zip(keys, lengths, positions, strict=True):
        if k.ndim != 2 or k.shape[1] != q.shape[2] or (length and k.shape[0] < (position + length) // block):
            raise ValueError(
                f"keys {k.shape} do not hold the {(position + length) // block} complete blocks of width {q.shape[2]} "
                f"that a query at position {position + length - 1} sees"
            )
    native = device.native()
    if native is not None and len({k.dtype for k in keys}) == 1:
        return native.select_blocks(
            q, keys, scale=scale, lengths=lengths, positions=positions, block=block, width=budget
        )
    if keys and cuda.takes(q, keys, budget):
        gpu = device.cuda()
        if gpu is not None and gpu.in_place:
            return cuda.choose(
                gpu,
                q,
                keys,
                scale=scale,
                lengths=lengths,
                positions=positions,
                block=block,
                budget=budget,
                memo={} if memo is None else memo,
            )
    chosen: list[mx.array] = []
    start = 0
    for k, length, position in zip(keys, lengths, positions, strict=True):
        if length:
            chosen.append(graph(q[start : start + length], k, scale, position, block, budget))
        start += length
    return joined(chosen) if chosen else mx.zeros((0, budget), mx.int32)


def graph(q: mx.array, k: mx.array, scale: float, position: int, block: int, budget: int) -> mx.array:
    """Plain MLX for one span, by tiles of queries."""
    length = q.shape[0]
    plain = min(length, max(0, dense_until(block, budget) - position))
    rows: list[mx.array] = []
    if plain:
        rows.append(_all_visible(position, plain, block, budget))
    visible = (position + length) // block
    tile = max(1, PRODUCT_BUDGET // max(1, visible * q.shape[1]))
    k = k[:visible].astype(mx.float32)
    for start in range(plain, length, tile):
        part = q[start : start + tile].astype(mx.float32)
        scores = mx.sum(mx.maximum(part @ k.T, 0), axis=1) * scale
        seen = _visible(position + start, part.shape[0], block)
        rows.append(select(scores, seen, budget))
    return joined(rows)


def select(scores: mx.array, visible: mx.array, budget: int) -> mx.array:
    """The `budget` best of the first `visible` `[T]` blocks of scores `[T, blocks]`: int32, rising, then −1."""
    blocks = scores.shape[1]
    if blocks == 0:
        return mx.full((scores.shape[0], budget), -1, mx.int32)
    numbers = mx.arange(blocks, dtype=mx.int32)
    # NaN is last in top_k's order, behind −inf: a visible block of any score comes before what cannot be seen.
    seen = mx.where(numbers < visible[:, None], mx.where(mx.isnan(scores), -mx.inf, scores), mx.nan)
    best = top_k(seen, min(budget, blocks))
    rising = mx.sort(mx.where(best < visible[:, None], best, blocks), axis=-1)
    rising = mx.where(rising < blocks, rising, -1)
    missing = budget - rising.shape[1]
    return mx.pad(rising, [(0, 0), (0, missing)], constant_values=mx.array(-1, mx.int32)) if missing > 0 else rising


def dense_until(block: int, budget: int) -> int:
    """The position from which queries may miss a block: those before it read as plain causal attention does."""
    return (budget + 1) * block - 1


def _visible(position: int, count: int, block: int) -> mx.array:
    """Complete blocks at each of `count` positions, int32."""
    return (mx.arange(position, position + count, dtype=mx.int32) + 1) // block


def _all_visible(position: int, count: int, block: int, budget: int) -> mx.array:
    numbers = mx.broadcast_to(mx.arange(budget, dtype=mx.int32), (count, budget))
    return mx.where(numbers < _visible(position, count, block)[:, None], numbers, -1)
