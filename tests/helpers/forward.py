"""Driving a model by hand: whole prompts, chunks, single steps and packed rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from arriero.model.contract import Batch, Model, Span


class Rows:
    """Some rows with their caches; every call feeds each the next tokens that it is given."""

    def __init__(self, model: Model, count: int = 1) -> None:
        self.model = model
        self.caches = [model.new_caches() for _ in range(count)]
        self.positions = [0] * count

    def batch(self, tokens: Sequence[Sequence[int]], **more: Any) -> Batch:
        """A batch of the rows that get tokens; moves their positions on."""
        spans, packed = [], []
        for row, new in enumerate(tokens):
            if len(new) == 0:
                continue
            spans.append(Span(len(packed), len(new), self.positions[row], self.caches[row]))
            packed.extend(int(t) for t in new)
            self.positions[row] += len(new)
        return Batch(mx.array(packed, mx.int32), spans, **more)

    def logits(self, tokens: Sequence[Sequence[int]]) -> np.ndarray:
        """Logits float32 `[T, vocab]` of every packed token."""
        hidden = self.model.forward(self.batch(tokens)).final
        return np.array(self.model.logits(hidden).astype(mx.float32))


def whole(model: Model, ids: Sequence[int]) -> np.ndarray:
    """Logits of a prompt in one forward."""
    return Rows(model).logits([ids])


def chunked(model: Model, ids: Sequence[int], sizes: Sequence[int]) -> np.ndarray:
    """Logits of a prompt in chunks of these sizes, over and over."""
    rows, parts, start, turn = Rows(model), [], 0, 0
    while start < len(ids):
        size = sizes[turn % len(sizes)]
        parts.append(rows.logits([ids[start : start + size]]))
        start, turn = start + size, turn + 1
    return np.concatenate(parts)


def packed(model: Model, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Logits of several prompts that share a forward."""
    together = Rows(model, len(prompts)).logits(prompts)
    edges = np.cumsum([len(p) for p in prompts])[:-1]
    return list(np.split(together, edges))
