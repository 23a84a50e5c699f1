"""Leaving a row and coming back: a model continues from snapshots and rewinds with the bits of an unbroken run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from arriero.model.contract import Batch, Model, Span
from tests.helpers.forward import whole


def held(caches: Sequence[Any]) -> list[Any]:
    """The caches of the layers that remember anything."""
    return [cache for cache in caches if cache is not None]


def follow(model: Model, caches: Any, tokens: Sequence[int], position: int) -> np.ndarray:
    """Logits of a row's next tokens."""
    batch = Batch(mx.array(tokens, mx.int32), [Span(0, len(tokens), position, caches)])
    return np.array(model.logits(model.forward(batch).final))


def snapshots_continue(model: Model, prompt: Sequence[int]) -> None:
    """Captures at every offset, taken while one long and some short forwards cross them, restored into fresh caches."""
    expected, caches, last = whole(model, prompt), model.new_caches(), len(prompt)
    offsets = list(range(1, last))
    for cache in held(caches):
        cache.plan(offsets)
    middle = last * 2 // 3
    for start, end in ((0, middle), (middle, middle + 1), (middle + 1, last)):
        follow(model, caches, prompt[start:end], start)
    taken = [cache.take() for cache in held(caches)]
    for i, offset in enumerate(offsets):
        fresh = model.new_caches()
        for cache, snapshots in zip(held(fresh), taken, strict=True):
            # Captures of positions chain; a state stands for all before it.
            joined = None
            for snapshot in snapshots[: i + 1]:
                joined = snapshot if joined is None else cache.merge(joined, snapshot)
            assert joined is not None
            assert cache.restore(joined)
            assert cache.offset == offset
        np.testing.assert_array_equal(follow(model, fresh, prompt[offset:], offset), expected[offset:])


def rewinds_continue(model: Model, prompt: Sequence[int]) -> None:
    """To every offset, behind three tokens that are thrown away as rejected drafts are."""
    expected = whole(model, prompt)
    for offset in range(1, len(prompt)):
        caches = model.new_caches()
        for cache in held(caches):
            cache.plan([offset])
        follow(model, caches, [*prompt[:offset], 5, 6, 7], 0)
        for cache in held(caches):
            (snapshot,) = cache.take()
            assert cache.rewind(offset, snapshot)
        np.testing.assert_array_equal(follow(model, caches, prompt[offset:], offset), expected[offset:])
