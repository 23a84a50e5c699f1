"""Kernels of models that keep a state beside, or instead of, a cache of keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from . import _native
else:
    from arriero_cpu import _native


def gated_delta(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    *,
    rate: mx.array,
    bias: mx.array,
    states: Sequence[mx.array],
    lengths: Sequence[int],
    stops: Sequence[Sequence[int]] | None = None,
    eps: float = 1e-6,
) -> tuple[mx.array, list[list[mx.array]]]:
    """The gated delta rule over packed rows, each span from its own state; everything in float32, one token at a time.

    ``q`` and ``k`` are [T, Hk, Dk], ``v`` [T, Hv, Dv] of one float dtype, ``a`` and ``b`` [T, Hv], ``rate`` and
    ``bias`` [Hv]; a state is float32 [Hv, Dv, Dk]. Per value head, which uses key head ``h // (Hv / Hk)``: q and k are
    divided by ``sqrt(sum of squares + eps)``, q then by ``sqrt(Dk)``; ``g = exp(-rate * softplus(a + bias))``;
    ``S = g S``; ``S += sigmoid(b) (v - S k) k^T``; ``y = S q``. Returns y [T, Hv, Dv] in ``v``'s dtype, and per span
    the states after each of its ``stops`` (rising, strictly inside the span) and at its end.
    """
    out = _native.gated_delta(q, k, v, a, b, rate, bias, list(states), list(lengths), _lists(stops), eps)
    return out[0], _by_span(out[1:], len(lengths), stops)


def depthwise_conv(
    x: mx.array,
    w: mx.array,
    bias: mx.array | None = None,
    *,
    tails: Sequence[mx.array],
    lengths: Sequence[int],
    stops: Sequence[Sequence[int]] | None = None,
    dilation: int = 1,
    silu: bool = False,
) -> tuple[mx.array, list[list[mx.array]]]:
    """Causal depthwise convolution of packed rows ``x`` [T, C] with ``w`` [K, C]; the last tap meets the token itself.

    ``tails[i]`` [(K - 1) * dilation, C] of ``x``'s dtype are the rows before span i. Sums are float32 and rounded once,
    after the optional SiLU. Returns y [T, C], and per span the tails after each of its ``stops`` and at its end.
    """
    out = _native.depthwise_conv(x, w, bias, list(tails), list(lengths), _lists(stops), dilation, silu)
    return out[0], _by_span(out[1:], len(lengths), stops)


def top_k(x: mx.array, k: int) -> mx.array:
    """int32 indices [..., k] of the k largest of the last axis: descending, equal ones by rising index, NaN last."""
    return _native.top_k(x, k)


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
) -> mx.array:
    """Attention of packed rows ``q`` [T, Hq, D] over listed blocks of ``block`` keys; returns [T, Hq, Dv].

    ``keys[i]`` and ``values[i]`` are [1, Hkv, K, D] and begin at position 0. A query at position p reads the keys of
    the blocks in its row of ``blocks`` [T, width] that are complete, that is below ``(p + 1) // block`` and not
    negative, and those behind the last complete block up to its own. A query without any key yields zeros.
    """
    return _native.indexed_attention(q, list(keys), list(values), blocks, scale, list(lengths), list(positions), block)


def select_blocks(
    q: mx.array,
    keys: Sequence[mx.array],
    *,
    scale: float,
    lengths: Sequence[int],
    positions: Sequence[int],
    block: int,
    width: int,
) -> mx.array:
    """The ``width`` best complete blocks of each query of ``q`` [T, H, D], rising, then -1: int32 [T, width].

    ``keys[i]`` [blocks, D] holds span i's block keys. A block's score is ``scale`` times the sum over heads of the
    positive products; equal scores go to the lower block.
    """
    return _native.select_blocks(q, list(keys), scale, list(lengths), list(positions), block, width)


def _lists(stops: Sequence[Sequence[int]] | None) -> list[list[int]]:
    return [] if stops is None else [list(s) for s in stops]


def _by_span(flat: Sequence[mx.array], spans: int, stops: Sequence[Sequence[int]] | None) -> list[list[mx.array]]:
    counts = [1] * spans if stops is None else [len(s) + 1 for s in stops]
    ends = [sum(counts[: i + 1]) for i in range(spans)]
    return [list(flat[end - count : end]) for end, count in zip(ends, counts, strict=True)]
