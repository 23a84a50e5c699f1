"""Running tokens through the experts that a router has chosen, whatever an expert computes."""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx

from arriero.model.layers.experts import SORT_FROM


class Run(Protocol):
    """Rows x `[R, in]` through experts `[R]` or `[R, k]`, uint32, to `[R, out]` or `[R · k, out]`.

    `ascending` says that the experts are in order, so that each is read once.
    """

    def __call__(self, x: mx.array, experts: mx.array, *, ascending: bool) -> mx.array: ...


def through_experts(x: mx.array, chosen: mx.array, weights: mx.array, run: Run) -> mx.array:
    """`Σ weight · run(x)` over the experts of each token, summed in float32, in x's dtype.

    x is `[T, in]`, `chosen` `[T, k]` and `weights` float32 `[T, k]`; returns `[T, out]`. Many tokens are sorted by
    expert first.
    """
    tokens, top_k = chosen.shape
    if tokens < SORT_FROM:
        y = run(x, chosen, ascending=False)
    else:
        flat = chosen.reshape(-1)
        order = mx.argsort(flat)
        y = run(x[order // top_k], flat[order], ascending=True)[mx.argsort(order)]
    y = y.reshape(tokens, top_k, -1).astype(mx.float32)
    return (weights[:, None, :] @ y).squeeze(1).astype(x.dtype)
