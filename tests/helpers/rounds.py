"""Rounds of greedy speculation by hand: what `Draft` promises to an engine, without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from arriero.model.contract import Batch, Cache, Draft, Hidden, Model, RowCaches, Span
from tests.helpers.drafts import Picks, one_row


@dataclass
class Round:
    """What one round verified, and how many tokens it gave."""

    block: list[int]
    produced: int
    scores: list[np.ndarray] = field(default_factory=list)


class Speculation:
    """One row: the target's and the draft's caches, and what the draft doesn't know yet.

    `force(position, best)` may say which token is picked for a position instead of the draft's best.
    """

    def __init__(self, target: Model, draft: Draft, force: Callable[[int], int] | None = None) -> None:
        self.target, self.draft, self.force = target, draft, force
        self.caches = target.new_caches()
        self.own: RowCaches = draft.new_caches()
        self.tokens: list[int] = []
        self.states: list[mx.array] = []
        """Those of every committed position, from `known` on."""
        self.known = 0
        self.rounds: list[Round] = []

    def prefill(self, prompt: list[int], chunk: int) -> int:
        """Read a prompt in chunks, keeping the draft level; the first token."""
        self.tokens = list(prompt)
        logits = None
        for start in range(0, len(prompt), chunk):
            part = prompt[start : start + chunk]
            hidden = self.target.forward(self._target_batch(part, start))
            self._keep(hidden, len(part))
            self.commit()
            logits = self.target.logits(hidden.final[-1:])
        assert logits is not None
        return int(mx.argmax(logits[0]).item())

    def commit(self) -> None:
        """Hand over what is complete: with a look-ahead, all but the last position."""
        end = min(self.known + len(self.states), len(self.tokens) - self.draft.facts.lookahead)
        if self.draft.facts.reads_target or end <= self.known:
            return
        self.draft.commit(self._draft_batch(end), mx.concatenate(self.states[: end - self.known]))
        mx.eval([array for cache in self.own if cache is not None for array in cache.state()])
        self.states, self.known = self.states[end - self.known :], end

    def round(self, anchor: int, count: int) -> list[int]:
        """One round; the tokens that it gives, of which the last is the next anchor."""
        n = len(self.tokens)
        pick = Picks(None if self.force is None else [self.force(n + 1 + i) for i in range(count)])
        self.tokens.append(anchor)
        batch, states = self._pending(n)
        guesses = self.draft.propose(batch, states, mx.array([anchor], mx.int32), count, pick).tolist()
        self.tokens.pop()
        self.states, self.known = [], n
        assert isinstance(guesses, list)
        block = [anchor, *(int(g) for g in guesses)]
        for cache in self.caches:
            if cache is not None:
                cache.plan(range(n + 1, n + len(block)))
        hidden = self.target.forward(self._target_batch(block, n))
        best = mx.argmax(self.target.logits(hidden.final), axis=-1).tolist()
        assert isinstance(best, list)
        kept = 0
        while kept < count and block[kept + 1] == best[kept]:
            kept += 1
        for cache in self.caches:
            if cache is not None:
                stored = cache.take()
                if kept < count:
                    assert cache.rewind(n + 1 + kept, stored[kept])
        self.tokens += block[: kept + 1]
        self._keep(hidden, kept + 1)
        self.rounds.append(Round(block, kept + 1, pick.scores))
        return [*block[1 : kept + 1], int(best[kept])]

    def generate(self, prompt: list[int], count: int, width: Callable[[], int], chunk: int = 512) -> list[int]:
        """`count` greedy tokens, with `width()` guesses a round where the budget allows them."""
        out = [self.prefill(prompt, chunk)]
        while len(out) < count:
            most = min(width(), count - len(out))
            if most < 1:
                break
            out += self.round(out[-1], most)
        return out[:count]

    def _keep(self, hidden: Hidden, count: int) -> None:
        found = hidden.for_head if not self.draft.facts.taps else hidden.taps
        assert found is not None
        self.states += [found[i : i + 1] for i in range(count)]

    def _target_batch(self, tokens: list[int], position: int) -> Batch:
        span = Span(0, len(tokens), position, self.caches)
        return Batch(mx.array(tokens, mx.int32), [span], taps=self.draft.facts.taps)

    def _draft_batch(self, end: int) -> Batch:
        ahead = self.draft.facts.lookahead
        return one_row(self.tokens[self.known + ahead : end + ahead], self.known, self.own)

    def _pending(self, n: int) -> tuple[Batch, mx.array]:
        if self.draft.facts.reads_target:
            return one_row(self.tokens[-1:], n - 1, self.caches), self.states[-1]
        if not self.states:
            width = self.target.facts.hidden_size * max(1, len(self.draft.facts.taps))
            return one_row([], n, self.own), mx.zeros((0, width), self.target.facts.dtype)
        return self._draft_batch(n), mx.concatenate(self.states)


def plain_greedy(model: Model, prompt: list[int], count: int) -> list[int]:
    """The loop without a draft."""
    caches = model.new_caches()
    tokens, position, out = prompt, 0, []
    for _ in range(count):
        hidden = model.forward(one_row(tokens, position, caches))
        position += len(tokens)
        tokens = [int(mx.argmax(model.logits(hidden.final[-1:])[0]).item())]
        out += tokens
    return out


def offsets(caches: RowCaches | list[Cache | None]) -> Iterator[int]:
    """How far each cache is."""
    return (cache.offset for cache in caches if cache is not None)
