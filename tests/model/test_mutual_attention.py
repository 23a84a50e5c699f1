"""Attention that shows the tokens of an image to each other, against a formula written out."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from arriero.model.contract import Batch, Features, Span
from arriero.model.layers.attention import attend
from arriero.runner.caches.full import KVCache
from arriero.runner.caches.sliding import SlidingCache

pytestmark = pytest.mark.usefixtures("kernels")

HEADS, KV_HEADS, WIDTH = 4, 2, 16


def by_hand(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int | None, first: int, end: int, start: int
) -> np.ndarray:
    """Rows from position `start` on of one row whose image is `[first, end)`."""
    positions = np.arange(len(k))
    out = []
    for position in range(start, len(k)):
        limit = end - 1 if first <= position < end else position
        seen = positions <= limit
        if window is not None:
            seen &= positions > position - window
        heads = []
        for head in range(HEADS):
            scores = k[seen, head // 2] @ q[position, head] * 0.3
            weights = np.exp(scores - scores.max())
            heads.append(weights / weights.sum() @ v[seen, head // 2])
        out.append(heads)
    return np.array(out)


@pytest.mark.parametrize("before", [0, 2, 700])
@pytest.mark.parametrize("window", [None, 8, 300])
def test_an_image_anywhere_in_a_row_sees_itself_and_nothing_behind(window: int | None, before: int) -> None:
    """Far into a row, what a window's cache holds no longer begins at position 0."""
    rng = np.random.default_rng(before)
    first, end, total = before + 1, before + 6, before + 10
    q, k, v = (rng.normal(size=(total, heads, WIDTH)).astype(np.float32) for heads in (HEADS, KV_HEADS, KV_HEADS))
    cache: KVCache | SlidingCache
    if window is None:
        cache = KVCache(KV_HEADS, WIDTH, WIDTH, mx.float32)
    else:
        cache = SlidingCache(KV_HEADS, WIDTH, WIDTH, mx.float32, window)
    found = mx.array(0)
    for low, high in ((0, before // 2), (before // 2, before), (before, total)):
        if high > low:
            rows = mx.zeros((end - first, 1))
            features = [Features(first - low, rows)] if low == before else []
            batch = Batch(mx.zeros(high - low, mx.int32), [Span(0, high - low, low, [cache])], features=features)
            parts = (mx.array(part[low:high]) for part in (q, k, v))
            found = attend(*parts, batch, 0, scale=0.3, window=window, mutual=True)
            mx.eval(found)
    expected = by_hand(q, k, v, window, first, end, before)
    np.testing.assert_allclose(np.array(found), expected, rtol=0, atol=2e-5)
