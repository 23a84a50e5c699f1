"""Attention of packed rows over chosen blocks of keys, each span over its own history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from arriero.kernels import device
from arriero.kernels.cuda import indexed as cuda
from arriero.kernels.metal import attention as metal
from arriero.kernels.spans import joined

GATHER_BUDGET = 1 << 24
"""Elements of keys and values that plain MLX gathers at a time."""


def indexed_attention(
    q: mx.array,
    keys: Sequence[mx.array],
    values: Sequence[mx.array],
    blocks: mx.array,
    *,
    scale: float,
    lengths: Sequence[int],
    positions: Sequence[int],
    block: int,
    memo: dict[Any, Any] | None = None,
) -> mx.array:
    """Attention of q `[T, q_heads, D]`; returns `[T, q_heads, Dv]` in q's dtype.

    `lengths[i]` rows of q belong to span i, whose first stands at absolute position `positions[i]`; `keys[i]` and
    `values[i]` `[1, kv_heads, K, D]` begin at position 0 and reach its last query. A query at position t reads the
    `block` keys of every block in its row of `blocks` (int32 `[T, width]`; −1, and blocks that are not complete at t,
    stand for none) and those of the incomplete block up to its own. A query that reads no key yields zeros. `memo` is
    what the layers of one forward share.

    Results don't depend on the queries that share the call (but on NVIDIA GPUs, in their last bits, where the keys of
    few queries are shared out), but do, in their last bits, on width and order of `blocks`, and differ as much from
    `attention` where every block is chosen: decide by a query's position which of the two it takes
    (`block_select.dense_until`), never by the call's. ValueError for shapes that don't fit.
    """
    if sum(lengths) != q.shape[0] or blocks.shape[0] != q.shape[0] or len(lengths) != len(keys):
        raise ValueError(
            f"{len(keys)} spans of {list(lengths)} queries with {blocks.shape[0]} block lists, but {q.shape[0]} queries"
        )
    for k, length, position in zip(keys, lengths, positions, strict=True):
        if length and k.shape[2] < position + length:
            raise ValueError(f"{k.shape[2]} keys do not reach the query at position {position + length - 1}")
    native = device.native()
    if native is not None and len({x.dtype for x in (*keys, *values)}) == 1:
        return native.indexed_attention(
            q, keys, values, blocks, scale=scale, lengths=lengths, positions=positions, block=block
        )
    if keys and cuda.takes(q, keys, values, blocks.shape[1]):
        gpu = device.cuda()
        if gpu is not None:
            return cuda.attend(
                gpu,
                q,
                keys,
                values,
                blocks,
                scale=scale,
                lengths=lengths,
                positions=positions,
                block=block,
                memo={} if memo is None else memo,
            )
    on_metal = device.metal()
    outputs: list[mx.array] = []
    start = 0
    for k, v, length, position in zip(keys, values, lengths, positions, strict=True):
        if length:
            part, listed = q[start : start + length], blocks[start : start + length]
            if on_metal and metal.takes(part, k, v):
                y = metal.indexed(part, k, v, listed, scale=scale, position=position, block=block)
            else:
                y = graph(part, k[0], v[0], listed, scale=scale, position=position, block=block)
            outputs.append(y)
        start += length
    return joined(outputs) if outputs else mx.zeros((0, q.shape[1], values[0].shape[3]), q.dtype)


def graph(
    q: mx.array, k: mx.array, v: mx.array, blocks: mx.array, *, scale: float, position: int, block: int
) -> mx.array:
    """Plain MLX for one span, k and v `[kv_heads, K, D]`: gathers what a tile of queries reads."""
    kv_heads = k.shape[0]
    listed = blocks.shape[1] * block + block - 1
    tile = max(1, GATHER_BUDGET // max(1, listed * kv_heads * (k.shape[2] + v.shape[2])))
    outputs: list[mx.array] = []
    for start in range(0, q.shape[0], tile):
        part = q[start : start + tile]
        here = mx.arange(position + start, position + start + part.shape[0], dtype=mx.int32)[:, None]
        tokens, valid = _listed(blocks[start : start + tile], here, block)
        outputs.append(_attend(part, k, v, tokens, valid, scale))
    return joined(outputs)


def _listed(blocks: mx.array, here: mx.array, block: int) -> tuple[mx.array, mx.array]:
    """Tokens `[T, width · block + block − 1]` of the lists and the tails, and which of them count."""
    complete = (here + 1) // block
    valid = (blocks >= 0) & (blocks < complete)
    tokens = (blocks[..., None] * block + mx.arange(block, dtype=mx.int32)).reshape(blocks.shape[0], -1)
    tail = complete * block + mx.arange(block - 1, dtype=mx.int32)
    tokens = mx.concatenate([tokens, tail], axis=-1)
    valid = mx.concatenate([mx.repeat(valid, block, axis=-1), tail <= here], axis=-1)
    return mx.where(valid, tokens, 0), valid


def _attend(q: mx.array, k: mx.array, v: mx.array, tokens: mx.array, valid: mx.array, scale: float) -> mx.array:
    rows, heads, width = q.shape
    kv_heads = k.shape[0]
    # [kv_heads, T, listed, D]: the heads of one key head are the rows of one matrix.
    chosen_k = mx.take(k, tokens, axis=1)
    # A weight of zero would not keep a value that is not finite out of the sum.
    chosen_v = mx.where(valid[None, :, :, None], mx.take(v, tokens, axis=1).astype(mx.float32), 0)
    grouped = q.astype(mx.float32).reshape(rows, kv_heads, heads // kv_heads, width).swapaxes(0, 1) * scale
    scores = grouped @ chosen_k.astype(mx.float32).swapaxes(-1, -2)
    # Finite, so that a row without any key gives numbers, which are then replaced.
    scores = mx.where(valid[None, :, None], scores, mx.finfo(mx.float32).min)
    weights = mx.softmax(scores, axis=-1, precise=True)
    y = (weights @ chosen_v).swapaxes(0, 1).reshape(rows, heads, v.shape[2])
    return mx.where(mx.any(valid, axis=-1)[:, None, None], y, 0).astype(q.dtype)
