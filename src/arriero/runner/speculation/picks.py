"""How a draft's scores become tokens, with the law that each was drawn from."""

from __future__ import annotations

import mlx.core as mx

from arriero.kernels.topk import argmax
from arriero.runner.sampling import Distribution, Sampler, stacked
from arriero.runner.speculation.verify import Rule, best


class Picker:
    """The `Pick` of one round of one row.

    - Scores over the whole vocabulary, one row at a time, become what the target's own would: all transforms, with
      penalties that see the drafts before.
    - Candidates with scores are drawn from with the row's temperature and nothing else, as their drafts were trained.
    - Rows of a block that are guessed apart (`conditional` false) are never drawn by chance: the best of each is taken.
    """

    def __init__(
        self, sampler: Sampler, row: str, rule: Rule, *, temperature: float, vocab_size: int, conditional: bool
    ) -> None:
        self._sampler = sampler
        self._row = row
        self._rule = rule
        self._temperature = temperature
        self._vocab_size = vocab_size
        self._conditional = conditional
        self._picked: list[mx.array] = []
        self._law: list[Distribution] = []

    @property
    def law(self) -> Distribution | None:
        """What the tokens so far were drawn from; None under a rule that does not ask."""
        return stacked(self._law) if self._law else None

    def __call__(self, scores: mx.array, ids: mx.array | None = None) -> mx.array:
        if ids is not None:
            tokens = self._from_candidates(scores, ids)
        elif self._conditional:
            tokens = self._from_all(scores)
        else:
            tokens = self._apart(scores)
        self._picked.append(tokens)
        return tokens

    def _from_all(self, scores: mx.array) -> mx.array:
        chain = mx.concatenate(self._picked) if self._picked else None
        source = self._sampler.distribution(self._row, scores, chain)
        if self._rule is Rule.BEST:
            return best(source)
        if self._rule is Rule.SAME:
            # The numbers that the target will draw with at this place: where both agree, so do their tokens.
            return self._sampler.peek(self._row, source, sum(part.shape[0] for part in self._picked))
        return self._drawn(source)

    def _from_candidates(self, scores: mx.array, ids: mx.array) -> mx.array:
        if self._rule is not Rule.RATIO:
            return _best_of(scores, ids)
        probs = mx.softmax(scores.astype(mx.float32) / max(self._temperature, 1e-5), axis=-1, precise=True)
        return self._drawn(Distribution(probs, ids, self._vocab_size))

    def _apart(self, scores: mx.array) -> mx.array:
        if self._rule is Rule.BEST:
            return best(self._sampler.distribution(self._row, scores))
        return argmax(scores).astype(mx.int32)

    def _drawn(self, source: Distribution) -> mx.array:
        self._law.append(source)
        return self._sampler.draw(self._row, source)


def _best_of(scores: mx.array, ids: mx.array) -> mx.array:
    chosen = argmax(scores).astype(mx.int32)[:, None]
    return mx.take_along_axis(ids, chosen, axis=-1)[:, 0].astype(mx.int32)
