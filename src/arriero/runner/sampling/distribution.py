"""What a token is drawn from: probabilities over the whole vocabulary, or over a few named tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from arriero.runner.sampling.randomness import gumbel


def normalised(weights: mx.array) -> mx.array:
    """Weights `[n, m]` ≥ 0 as probabilities; a row without any weight stays zero."""
    return weights / mx.maximum(mx.sum(weights, axis=-1, keepdims=True), 1e-20)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Probabilities of n rows: dense `[n, vocab]`, or sparse `[n, m]` with the tokens `ids` `[n, m]` that they are of.

    In a sparse row a token occurs once; what is not named has probability 0.
    """

    probs: mx.array
    """float32."""
    ids: mx.array | None
    """int32; None = dense."""
    vocab_size: int

    @property
    def rows(self) -> int:
        return self.probs.shape[0]

    def __getitem__(self, rows: slice) -> Distribution:
        """Some of the rows."""
        return Distribution(self.probs[rows], None if self.ids is None else self.ids[rows], self.vocab_size)

    def probability_of(self, tokens: mx.array) -> mx.array:
        """Probability `[n]` of one token a row, `tokens` `[n]`."""
        return self.at(tokens[:, None])[:, 0]

    def at(self, tokens: mx.array) -> mx.array:
        """Probabilities `[n, k]` of tokens `[n, k]`."""
        if self.ids is None:
            return mx.take_along_axis(self.probs, tokens, axis=-1)
        same = self.ids[:, None, :] == tokens[:, :, None]
        return mx.sum(mx.where(same, self.probs[:, None, :], 0.0), axis=-1)

    def dense(self) -> Distribution:
        """The same over the whole vocabulary."""
        if self.ids is None:
            return self
        rows = mx.arange(self.rows)[:, None]
        full = mx.zeros((self.rows, self.vocab_size), mx.float32)
        return Distribution(full.at[rows, self.ids].add(self.probs), None, self.vocab_size)

    def residual(self, draft: Distribution) -> Distribution:
        """What to draw from after a token of `draft` was rejected: `max(self − draft, 0)`, renormalised.

        Sparse stays sparse on its own support; either may be dense. Rows in which the two agree are all zero and must
        not be drawn from (nothing is ever rejected there). ValueError for other numbers of rows or vocabularies.
        """
        if draft.rows != self.rows or draft.vocab_size != self.vocab_size:
            raise ValueError(
                f"residual of {self.rows} rows over {self.vocab_size} tokens and {draft.rows} rows over "
                f"{draft.vocab_size}; both must be the same"
            )
        if self.ids is not None:
            left = self.probs - draft.at(self.ids)
        elif draft.ids is None:
            left = self.probs - draft.probs
        else:
            left = self.probs.at[mx.arange(self.rows)[:, None], draft.ids].subtract(draft.probs)
        return Distribution(normalised(mx.maximum(left, 0.0)), self.ids, self.vocab_size)

    def draw(self, keys: mx.array) -> mx.array:
        """One token a row, `[n]` int32, each with its own key of `keys` `[n, 2]`.

        The same as `mx.random.categorical` of a row's log-probabilities with that row's key, whatever is beside it.
        """
        chosen = mx.argmax(mx.log(self.probs) + gumbel(keys, self.probs.shape[-1]), axis=-1, keepdims=True)
        if self.ids is not None:
            chosen = mx.take_along_axis(self.ids, chosen, axis=-1)
        return chosen[:, 0].astype(mx.int32)


def stacked(parts: Sequence[Distribution]) -> Distribution:
    """The rows of several distributions over one vocabulary, one after another; dense if any is.

    Sparse ones of different widths are widened by probabilities of 0.
    """
    if any(part.ids is None for part in parts):
        dense = [part.dense().probs for part in parts]
        return Distribution(mx.concatenate(dense, axis=0), None, parts[0].vocab_size)
    width = max(part.probs.shape[1] for part in parts)
    probs, ids = [], []
    for part in parts:
        assert part.ids is not None
        missing = [(0, 0), (0, width - part.probs.shape[1])]
        probs.append(mx.pad(part.probs, missing))
        ids.append(mx.pad(part.ids, missing, constant_values=-1))
    return Distribution(mx.concatenate(probs, axis=0), mx.concatenate(ids, axis=0), parts[0].vocab_size)
