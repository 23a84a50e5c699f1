"""Golden targets and drafts over a few tokens, whose forwards are computed once for each text and then looked up.

So a sampled reply costs what the engine and its rules cost, and tens of thousands can be drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from arriero.model.contract import Batch, Draft, Hidden, Model, Pick, RowCaches, Snapshot, Span
from arriero.runner.caches.linear import LinearCache
from tests.helpers.drafts import Picks

SPREAD = 1.2
"""Standard deviation that logits get, so that every token that may be said is said now and then."""
NOTHING = -1e9


class Said(LinearCache):
    """A cache that holds the tokens themselves."""

    def __init__(self) -> None:
        super().__init__(1, 1, 1, mx.float32)
        self.ids: list[int] = []

    @property
    def offset(self) -> int:
        return len(self.ids)

    def rewind(self, offset: int, snapshot: Snapshot | None = None) -> bool:
        del self.ids[offset:]
        return True

    def restore(self, snapshot: Snapshot, offset: int | None = None) -> bool:
        return False

    def split(self, snapshot: Snapshot, at: int) -> tuple[Snapshot | None, Snapshot | None]:
        return None, snapshot

    def merge(self, parent: Snapshot | None, child: Snapshot | None) -> Snapshot | None:
        return child

    def _first_for(self, position: int) -> int:
        return 0

    def _base_for(self, offset: int) -> int:
        return 0

    def _capture(self, start: int, offset: int) -> Any:
        return None


class MemoisedModel:
    """A model that can only say the tokens `few`; its hidden state is the number of the text so far."""

    def __init__(self, model: Model, few: Sequence[int]) -> None:
        self.model, self.facts = model, model.facts
        self.few = np.array(few)
        self._numbers: dict[tuple[int, ...], int] = {}
        self._texts: list[tuple[int, ...]] = []
        self._logits: dict[int, np.ndarray] = {}
        self._stacked: dict[tuple[int, ...], mx.array] = {}

    def new_caches(self) -> RowCaches:
        return [Said()]

    def forward(self, batch: Batch) -> Hidden:
        tokens, numbers = np.array(batch.tokens).tolist(), []
        for span in batch.spans:
            cache = span.caches[0]
            assert isinstance(cache, Said)
            assert cache.offset == span.position
            for token in tokens[span.start : span.start + span.length]:
                cache.ids.append(token)
                numbers.append(self.number(tuple(cache.ids)))
        states = mx.array(numbers, mx.float32)[:, None]
        return Hidden(states, states if batch.taps else None)

    def number(self, text: tuple[int, ...]) -> int:
        if text not in self._numbers:
            self._numbers[text] = len(self._texts)
            self._texts.append(text)
        return self._numbers[text]

    def text(self, number: int) -> tuple[int, ...]:
        return self._texts[number]

    def row(self, text: tuple[int, ...]) -> np.ndarray:
        """Logits behind a text, `[vocab]`."""
        number = self.number(text)
        if number not in self._logits:
            batch = Batch(mx.array(text, mx.int32), [Span(0, len(text), 0, self.model.new_caches())])
            logits = np.array(self.model.logits(self.model.forward(batch).final[-1:])[0])
            self._logits[number] = self.narrowed(logits)
        return self._logits[number]

    def narrowed(self, logits: np.ndarray) -> np.ndarray:
        """Only the few tokens, with a spread of their own."""
        chosen = logits[self.few].astype(np.float64)
        narrow = np.full(logits.shape, NOTHING, np.float32)
        narrow[self.few] = (chosen - chosen.mean()) / max(chosen.std(), 1e-6) * SPREAD
        return narrow

    def logits(self, hidden: mx.array) -> mx.array:
        numbers = tuple(int(number) for number in np.array(hidden)[:, 0])
        if numbers not in self._stacked:
            self._stacked[numbers] = mx.array(np.stack([self.row(self._texts[number]) for number in numbers]))
        return self._stacked[numbers]

    def parameters(self) -> Iterable[mx.array]:
        return []


class MemoisedDraft:
    """A draft for it. The scores that it picks by are the real draft's, for the same text and the same picks before."""

    def __init__(self, target: MemoisedModel, draft: Draft) -> None:
        self.target, self.draft, self.facts = target, draft, draft.facts
        self._scores: dict[tuple[Any, ...], tuple[mx.array, mx.array | None]] = {}

    def new_caches(self) -> RowCaches:
        return [] if self.facts.reads_target else [Said()]

    def commit(self, batch: Batch, states: mx.array) -> None:
        numbers = np.array(states)[:, 0].astype(int).tolist()
        for span in batch.spans:
            cache = span.caches[0]
            if isinstance(cache, Said) and not self.facts.reads_target:
                cache.ids = list(self.target.text(numbers[span.start + span.length - 1]))
                assert len(cache.ids) == span.position + span.length

    def propose(self, batch: Batch, states: mx.array, anchor: mx.array, count: int, pick: Pick) -> mx.array:
        if batch.spans[0].length:
            self.commit(batch, states)
        known = batch.spans[0].caches[0]
        assert isinstance(known, Said)
        text = (*known.ids, int(np.array(anchor)[0]))
        chosen: list[int] = []
        while len(chosen) < count:
            scores, ids = self._scored(text, tuple(chosen), count)
            chosen += np.array(pick(scores, ids)).tolist()
        return mx.array(chosen, mx.int32)

    def parameters(self) -> Iterable[mx.array]:
        return []

    def _scored(self, text: tuple[int, ...], chosen: tuple[int, ...], count: int) -> tuple[mx.array, mx.array | None]:
        """What the next pick gets: the scores of one token, or of all rows of a block."""
        key = text, chosen, count
        if key not in self._scores:
            model, draft, length = self.target.model, self.draft, len(text) - 1
            caches = model.new_caches()
            batch = Batch(mx.array(text[:-1], mx.int32), [Span(0, length, 0, caches)], taps=self.facts.taps)
            hidden = model.forward(batch)
            states = hidden.taps if self.facts.taps else hidden.for_head
            assert states is not None
            ahead = self.facts.lookahead
            span = Span(0, length, 0, caches if self.facts.reads_target else draft.new_caches())
            picks = Picks([*chosen, *[0] * count])
            told = Batch(mx.array(text[ahead : length + ahead], mx.int32), [span])
            draft.propose(told, states, mx.array(text[-1:], mx.int32), count, picks)
            rows = slice(len(chosen), len(chosen) + 1) if self.facts.conditional else slice(None)
            scores, ids = np.stack(picks.scores[rows]), picks.ids[rows]
            if ids[0] is None:
                narrow = np.stack([self.target.narrowed(row) for row in scores])
                self._scores[key] = mx.array(narrow), None
            else:
                self._scores[key] = self._renamed(scores[0], np.array(ids[0]))
        return self._scores[key]

    def _renamed(self, scores: np.ndarray, ids: np.ndarray) -> tuple[mx.array, mx.array]:
        """Candidates, the best of which are called as all but one of the few; only the draft would say the others."""
        few = self.target.few
        best = np.argsort(-scores)[: len(few) - 1]
        turned = np.roll(few, int(ids.sum()))[: len(best)]
        names = np.where(np.isin(ids, few), -1, ids)
        names[best] = turned
        # What shares its name with one of the few is left out, at a name that no other has.
        unused = np.setdiff1d(np.arange(self.target.facts.vocab_size), np.concatenate([names, few]))
        wrong = names < 0
        names[wrong] = unused[: wrong.sum()]
        spread = (scores - scores.mean()) / max(float(scores.std()), 1e-6) * SPREAD
        spread[wrong] = NOTHING
        return mx.array(spread.astype(np.float32))[None], mx.array(names.astype(np.int32))[None]
