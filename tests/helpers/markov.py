"""A target and a draft that are tables: the law of a token depends on the one before it and on nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

import mlx.core as mx
import numpy as np

from arriero.model.contract import Batch, DraftFacts, Hidden, ModelFacts, Pick, RowCaches


class MarkovModel:
    """Logits of the next token by the last one. Without caches; its hidden state is the token."""

    def __init__(self, vocab: int = 6, seed: int = 0, context: int = 1 << 20, spread: float = 1.2) -> None:
        self.table = np.random.default_rng(seed).normal(0, spread, (vocab, vocab)).astype(np.float32)
        self._rows = mx.array(self.table)
        self.facts = ModelFacts("markov", vocab, 1, 1, context, mx.float32, 0)
        self.forwards = 0

    @classmethod
    def load(cls, checkpoint: Any, dtype: mx.Dtype) -> Self:
        return cls(**checkpoint.config)

    def new_caches(self) -> RowCaches:
        return []

    def forward(self, batch: Batch) -> Hidden:
        self.forwards += 1
        return Hidden(batch.tokens.astype(mx.float32)[:, None])

    def logits(self, hidden: mx.array) -> mx.array:
        return self._rows[hidden[:, 0].astype(mx.int32)]

    def embed(self, tokens: mx.array) -> mx.array:
        return tokens.astype(mx.float32)[:, None]

    def raw_logits(self, hidden: mx.array) -> mx.array:
        return self.logits(hidden)

    def parameters(self) -> Iterable[mx.array]:
        return [self._rows]


class MarkovDraft:
    """Guesses by another table. `candidates`: of each row only the best so many, with their scores."""

    def __init__(self, target: MarkovModel, seed: int = 1, candidates: int = 0, limit: int | None = None) -> None:
        rng = np.random.default_rng(seed)
        self.target = target
        self.table = mx.array(target.table + rng.normal(0, 0.8, target.table.shape).astype(np.float32))
        self.candidates = candidates
        self.facts = DraftFacts("markov draft", limit)

    def new_caches(self) -> RowCaches:
        return []

    def commit(self, batch: Batch, states: mx.array) -> None:
        """It needs nothing but the last token."""

    def propose(self, batch: Batch, states: mx.array, anchor: mx.array, count: int, pick: Pick) -> mx.array:
        tokens = [anchor]
        for _ in range(count):
            scores = self.table[tokens[-1]]
            if self.candidates:
                ids = mx.argsort(-scores, axis=-1)[:, : self.candidates].astype(mx.int32)
                tokens.append(pick(mx.take_along_axis(scores, ids, axis=-1), ids))
            else:
                tokens.append(pick(scores))
        return mx.concatenate(tokens[1:])

    def parameters(self) -> Iterable[mx.array]:
        return [self.table]
