"""Attention of packed rows, each span over its own history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from arriero.kernels import device
from arriero.kernels.activation import softcap as cap
from arriero.kernels.metal import attention as metal

ALIGN = 256
"""Histories are cut at multiples of this, so that a key's place in a sum does not depend on the cut."""

FUSED_WIDTH = 256
"""The widest heads that a device may have a fused kernel for."""

PLANNED_WIDTH = 128
"""The widest heads that cuDNN computes, which makes a plan for each shape: 40 to 57 ms (H200)."""
PLANS = ((2048, 256), (8192, 512), (1 << 31, 1024))
"""What queries and keys are multiples of there, by how many keys there are at most: few shapes come again and again."""

SHARED_HEADS = 16
"""The most query heads of one key head whose keys the CPU extension shares out among threads for a single query."""

QUERY_BLOCK = 512
SCORE_BUDGET = 1 << 25
"""Scores (all heads) of one block of queries where no fused kernel keeps them out of memory."""


def attention(
    q: mx.array,
    keys: Sequence[mx.array],
    values: Sequence[mx.array],
    *,
    scale: float,
    lengths: Sequence[int],
    positions: Sequence[int],
    bases: Sequence[int] | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    causal: bool = True,
    memo: dict[Any, Any] | None = None,
) -> mx.array:
    """Attention of q `[T, q_heads, D]`; returns `[T, q_heads, Dv]` in q's dtype.

    `lengths[i]` rows of q belong to span i, whose first query stands at absolute position `positions[i]`. `keys[i]`
    and `values[i]` are `[1, kv_heads, K, D]` and begin at absolute position `bases[i]` (default 0). A query sees the
    keys up to its own position, or all with `causal=False`; with `window` only the last `window` of them, itself
    included.
    `softcap` c turns a score s into `c · tanh(s / c)`; `sinks` holds one extra logit per query head, without a value.
    `memo` keeps masks that the layers of one forward share.

    In float32 on the CPU a query's result does not depend, to the bit, on the queries that share the call nor on keys
    that it cannot see.
    """
    bases = [0] * len(keys) if bases is None else bases
    memo = {} if memo is None else memo
    if sum(lengths) != q.shape[0]:
        raise ValueError(f"spans hold {sum(lengths)} queries, but {q.shape[0]} were given")
    native = device.native()
    # The extension's windows are those of causal attention only.
    if native is not None and (causal or window is None):
        views = _views(q.shape[1], keys[0].shape[1]) if keys else 1
        return native.attention(
            q,
            _repeated(keys, views),
            _repeated(values, views),
            scale=scale,
            lengths=lengths,
            counts=[k.shape[2] for k in keys],
            positions=positions,
            bases=bases,
            window=window,
            softcap=softcap,
            sinks=sinks,
            causal=causal,
        )
    on_metal = device.metal()
    outputs: list[mx.array] = []
    start = 0
    for k, v, length, position, base in zip(keys, values, lengths, positions, bases, strict=True):
        part = q[start : start + length]
        if on_metal and length <= metal.MOST_QUERIES and metal.takes(part, k, v):
            outputs.append(
                metal.dense(
                    part,
                    k,
                    v,
                    scale=scale,
                    position=position,
                    base=base,
                    window=window,
                    softcap=softcap,
                    sinks=sinks,
                    causal=causal,
                )
            )
            start += length
            continue
        before = 0
        if causal and length > 1 and softcap is None and planned(part):
            part, before = _padded(part, position - base, k.shape[2])
        span = part.swapaxes(0, 1)[None]
        made = graph(
            span,
            k,
            v,
            scale=scale,
            position=position - before,
            base=base,
            window=window,
            softcap=softcap,
            sinks=sinks,
            causal=causal,
            memo=memo,
        )
        # An index copies. On a GPU that is a gather for nothing (69 µs, H200); elsewhere plain MLX has fewer tiles of
        # scores under way with it (below 320 MiB instead of 378 for 8,192 tokens of a test's Flash Next).
        made = (made[0] if device.cuda() is None else made.squeeze(0)).swapaxes(0, 1)
        outputs.append(made if made.shape[0] == length else made[before : before + length])
        start += length
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=0)


def planned(q: mx.array) -> bool:
    """Whether a plan is made for each shape of these queries `[T, q_heads, D]` and their keys."""
    return planned_heads(q.shape[2], q.dtype)


def planned_heads(width: int, dtype: mx.Dtype) -> bool:
    """The same of queries with heads of this width."""
    return width <= PLANNED_WIDTH and dtype in (mx.bfloat16, mx.float16) and device.cuda() is not None


def _padded(q: mx.array, place: int, held: int) -> tuple[mx.array, int]:
    """Queries `[L, q_heads, D]`, the first at `place` of `held` keys, and how many of no account stand before them now.

    Keys beyond a query are hidden from it as ever, and what those of no account see goes nowhere.
    """
    before, behind = spare(place, q.shape[0], held)
    return mx.pad(q, [(before, behind), (0, 0), (0, 0)]) if before or behind else q, before


def spare(place: int, length: int, held: int) -> tuple[int, int]:
    """How many queries of no account stand before and behind `length` others, the first at `place` of `held` keys.

    They begin and end at multiples of one number, as far as there are keys.
    """
    end = place + length
    step = next(step for most, step in PLANS if end <= most)
    return place % step, max(0, min(-(-end // step) * step, held) - end)


def _views(heads: int, kv_heads: int) -> int:
    """As how many key heads a lone one is shown, so that few enough query heads share each."""
    if kv_heads > 1:
        return 1
    return next(views for views in range(1, heads + 1) if heads % views == 0 and heads // views <= SHARED_HEADS)


def _repeated(arrays: Sequence[mx.array], views: int) -> Sequence[mx.array]:
    """The same memory as several heads."""
    return arrays if views == 1 else [mx.broadcast_to(a, (1, views, *a.shape[2:])) for a in arrays]


def graph(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    position: int,
    base: int,
    window: int | None,
    softcap: float | None,
    sinks: mx.array | None,
    causal: bool,
    memo: dict[Any, Any],
) -> mx.array:
    """Plain MLX for one span: q `[1, q_heads, L, D]` over k, v `[1, kv_heads, K, D]`, by blocks of queries."""
    length, held = q.shape[2], k.shape[2]
    fused = softcap is None and not device.on_cpu() and q.shape[3] <= FUSED_WIDTH
    block = length
    if not (fused and window is None):
        reach = held if window is None else min(held, window + QUERY_BLOCK + ALIGN)
        block = max(1, min(QUERY_BLOCK, SCORE_BUDGET // max(1, reach * q.shape[1])))
    outputs: list[mx.array] = []
    for start in range(0, length, block):
        count = min(block, length - start)
        first = position + start
        stop = min(held, first + count - base) if causal else held
        cut = 0
        if window is not None:
            # The oldest key of the block's first query, brought down to a multiple of ALIGN on the absolute axis.
            cut = max(0, (first - window + 1) // ALIGN * ALIGN - base)
        mask = _mask(memo, first, count, base + cut, base + stop, window, causal)
        part = q if count == length else q[:, :, start : start + count]
        outputs.append(_block(part, k[:, :, cut:stop], v[:, :, cut:stop], scale, mask, softcap, sinks))
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)


def _mask(
    memo: dict[Any, Any], first: int, count: int, low: int, high: int, window: int | None, causal: bool
) -> mx.array | str | None:
    """What hides keys `[low, high)` from queries `[first, first + count)`: nothing, MLX's causal mode, or a table."""
    windowed = window is not None and low <= first + count - 1 - window
    if not windowed:
        if not causal or count == 1:
            return None
        return "causal"
    key = ("attention mask", first, count, low, high, window, causal)
    mask: mx.array | None = memo.get(key)
    if mask is None:
        queries = mx.arange(first, first + count, dtype=mx.int32)[:, None]
        positions = mx.arange(low, high, dtype=mx.int32)[None]
        assert window is not None
        mask = positions > queries - window
        if causal:
            mask = mask & (positions <= queries)
        memo[key] = mask
    return mask


def _block(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    scale: float,
    mask: mx.array | str | None,
    softcap: float | None,
    sinks: mx.array | None,
) -> mx.array:
    _, heads, count, width = q.shape
    kv_heads, held = k.shape[1], k.shape[2]
    if softcap is None:
        if count == 1 and mask is None and sinks is None and width > FUSED_WIDTH:
            # The query heads of one key head as rows of one product, which reads the keys once for all of them.
            rows = q.reshape(1, kv_heads, heads // kv_heads, width)
            return mx.fast.scaled_dot_product_attention(rows, k, v, scale=scale).reshape(1, heads, 1, v.shape[-1])
        return mx.fast.scaled_dot_product_attention(
            q, k, v, scale=scale, mask=mask, sinks=None if sinks is None else sinks.astype(q.dtype)
        )
    grouped = q.astype(mx.float32).reshape(1, kv_heads, heads // kv_heads, count, width) * scale
    scores = cap(grouped @ k.astype(mx.float32)[:, :, None].swapaxes(-1, -2), softcap)
    if isinstance(mask, str):
        mask = mx.arange(held)[None] <= mx.arange(held - count, held)[:, None]
    if mask is not None:
        scores = mx.where(mask, scores, -mx.inf)
    if sinks is not None:
        extra = sinks.astype(mx.float32).reshape(1, kv_heads, heads // kv_heads, 1, 1)
        # In front, so that its place in the sums does not move with the number of keys.
        scores = mx.concatenate([mx.broadcast_to(extra, (*scores.shape[:-1], 1)), scores], axis=-1)
    weights = mx.softmax(scores, axis=-1, precise=True)
    if sinks is not None:
        weights = weights[..., 1:]
    y = weights @ v.astype(mx.float32)[:, :, None]
    return y.reshape(1, heads, count, v.shape[-1]).astype(q.dtype)
