"""What heads that guess one token after another share: each guess is a step through the head's own caches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import mlx.core as mx

from arriero.model.contract import Batch, Draft, DraftFacts, Model, Pick, RowCaches, Span
from arriero.model.layers.decoder import arrays


class ChainedHead(ABC, Draft):
    """A head with caches that takes the target's states, and for later tokens its own.

    Its position p holds the pair of the target's state at p and the token at p + 1, and gives the scores of the token
    at p + 2.
    """

    def __init__(self, facts: DraftFacts, target: Model) -> None:
        self.facts = facts
        self.target = target

    @abstractmethod
    def forward(self, batch: Batch, states: mx.array) -> mx.array:
        """Pairs of the batch's tokens `[T]` and states `[T, width]` to the head's states, `[T, width]`.

        Appends to the spans' caches.
        """

    @abstractmethod
    def logits(self, states: mx.array) -> mx.array:
        """The head's states `[n, width]` to logits `[n, vocab]`."""

    @abstractmethod
    def parts(self) -> list[Any]:
        """The components that the head owns."""

    def commit(self, batch: Batch, states: mx.array) -> None:
        self.forward(batch, states)

    def propose(self, batch: Batch, states: mx.array, anchor: mx.array, count: int, pick: Pick) -> mx.array:
        span = single_span(batch, count, self.facts.limit)
        end = span.position + span.length
        state = self.forward(batch, states)[-1:]
        tokens = [pick(self.logits(state))]
        for position in range(end, end + count - 1):
            step = Span(0, 1, position, span.caches, span.layout)
            state = self.forward(Batch(tokens[-1].astype(mx.int32), [step]), state)
            tokens.append(pick(self.logits(state)))
        rewind(span.caches, end)
        return mx.concatenate(tokens).astype(mx.int32)

    def parameters(self) -> Iterable[mx.array]:
        return list({id(array): array for array in arrays(self.parts())}.values())


def single_span(batch: Batch, count: int, limit: int | None) -> Span:
    """The one span of a `propose`; ValueError as `Draft.propose` says."""
    if len(batch.spans) != 1:
        raise ValueError(f"tokens are proposed for one row at a time, but the batch has {len(batch.spans)}")
    if count < 1 or (limit is not None and count > limit):
        raise ValueError(
            f"{count} tokens asked for; this draft proposes 1 to {'any number' if limit is None else limit}"
        )
    return batch.spans[0]


def rewind(caches: RowCaches | Any, offset: int) -> None:
    """Take every cache back to `offset`; ValueError when one can't."""
    for cache in caches:
        if cache is not None and not cache.rewind(offset):
            raise ValueError(f"a draft's cache at {cache.offset} can't go back to {offset}")
