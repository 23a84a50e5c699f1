"""Golden drafts with their targets, and ways to pick tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from arriero.model.architectures import load_model
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Batch, Cache, Hidden, Model, RowCaches, Span
from arriero.source import FolderSource
from tests.helpers.forward import Rows
from tests.helpers.memory_checkpoint import MemoryCheckpoint

TARGETS = Path(__file__).parents[1] / "model" / "goldens"
GOLDENS = Path(__file__).parents[1] / "model" / "drafts" / "goldens"


def draft_checkpoint(name: str) -> MemoryCheckpoint:
    """A draft's own checkpoint."""
    return MemoryCheckpoint.golden(GOLDENS / name)


def target_checkpoint(name: str) -> MemoryCheckpoint:
    """That of the model which the golden draft was made for."""
    return MemoryCheckpoint.golden(TARGETS / draft_checkpoint(name).config["target"])


def with_head(name: str, **changes: Any) -> MemoryCheckpoint:
    """The target's checkpoint with the golden head in it."""
    target = target_checkpoint(name).copy(**changes)
    return MemoryCheckpoint(target.config, target.tensors | draft_checkpoint(name).tensors)


def target_of(name: str, dtype: mx.Dtype = mx.float32) -> Model:
    """The golden model that it was made for."""
    folder = TARGETS / draft_checkpoint(name).config["target"]
    return load_model(Checkpoint.open(FolderSource(str(folder))), dtype)


def golden_of(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDENS / name / "golden.npz") as file:
        return dict(file)


def target_ids(name: str) -> list[int]:
    with np.load(TARGETS / draft_checkpoint(name).config["target"] / "golden.npz") as file:
        found: list[int] = file["ids"].tolist()
    return found


def target_states(model: Model, ids: Sequence[int], taps: Sequence[int] = ()) -> tuple[Hidden, RowCaches]:
    """What the target makes of a prompt, and the caches that it leaves."""
    rows = Rows(model)
    return model.forward(rows.batch([ids], taps=taps)), rows.caches[0]


def one_row(tokens: Sequence[int], position: int, caches: Sequence[Cache | None]) -> Batch:
    """A batch of one span."""
    return Batch(mx.array(list(tokens), mx.int32), [Span(0, len(tokens), position, caches)])


class Picks:
    """Picks the best, or the tokens given, and keeps the scores that it was asked with."""

    def __init__(self, tokens: Sequence[int] | None = None) -> None:
        self.tokens = None if tokens is None else list(tokens)
        self.scores: list[np.ndarray] = []
        self.ids: list[np.ndarray | None] = []

    def __call__(self, scores: mx.array, ids: mx.array | None = None) -> mx.array:
        self.scores += list(np.array(scores.astype(mx.float32)))
        self.ids += [None] * len(scores) if ids is None else list(np.array(ids))
        if self.tokens is not None:
            taken, self.tokens = self.tokens[: len(scores)], self.tokens[len(scores) :]
            return mx.array(taken, mx.int32)
        best = mx.argmax(scores, axis=-1, keepdims=True)
        found: mx.array = (best if ids is None else mx.take_along_axis(ids, best, axis=-1))[:, 0]
        return found.astype(mx.int32)


def cache_bits(caches: Sequence[Cache | None]) -> list[np.ndarray]:
    """What caches of keys and values hold, `[base, offset)` of each."""
    found = []
    for cache in caches:
        if cache is not None and cache.offset:
            keys, values = cache.range(max(cache.base, 0), cache.offset)  # type: ignore[attr-defined]
            found += [np.array(keys.astype(mx.float32)), np.array(values.astype(mx.float32))]
    return found
