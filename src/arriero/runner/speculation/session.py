"""A draft beside one row: what it has not been told yet, its caches, and what it proposes."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from arriero.model.contract import Batch, Cache, Draft, Span
from arriero.runner.caches.snapshot import fresh
from arriero.runner.row import Row
from arriero.runner.speculation.picks import Picker

FLUSH = 256
"""States of the target that may wait for the draft; one forward of it then takes them all."""


class Session:
    """Keeps a draft level with the row's target, and asks it for tokens.

    The target's states of positions `[offset, offset + waiting)` wait here until the draft needs them: while nothing is
    drafted it costs one forward every `FLUSH` tokens.
    """

    def __init__(self, draft: Draft, row: Row, caches: Sequence[Cache | None]) -> None:
        self._draft = draft
        self._row = row
        self.caches = list(caches)
        self._waiting: list[mx.array] = []
        self._count = 0
        self._offset = row.position

    @property
    def offset(self) -> int:
        """Positions that the draft knows."""
        return self._offset

    @property
    def waiting(self) -> int:
        """Positions that it has yet to be told."""
        return self._count

    @property
    def ready(self) -> bool:
        """Whether it can propose: a draft that looks ahead begins with a state it has not seen, others with any."""
        return self._count > 0 if self._draft.facts.lookahead else self._offset + self._count > 0

    def told(self, length: int) -> None:
        """The draft took in the next `length` positions of the prompt, in a forward of many rows."""
        if self._count:
            raise RuntimeError(f"a prompt goes on while {self._count} states wait for the draft")
        self._offset += length

    def skipped(self, length: int, last: mx.array) -> None:
        """As `told`, for a draft that needs nothing but the state of the last position, `[1, width]`."""
        self._offset += self._count + length - 1
        self._waiting, self._count = [last], 1

    def follow(self, states: mx.array) -> None:
        """The target's states `[n, width]` of the positions that come next."""
        if self._draft.facts.reads_target:
            # It starts from the state of the last position, and from the target's own keys.
            self.skipped(states.shape[0], states[-1:])
            return
        self._waiting.append(states)
        self._count += states.shape[0]

    def flush(self, end: int) -> None:
        """Tell the draft all states before position `end`; what waits for later positions is kept."""
        count = min(end - self._offset, self._count)
        if count <= 0 or self._draft.facts.reads_target:
            return
        states = self._joined()
        self._draft.commit(self._batch(count), states[:count])
        self._offset += count
        self._count -= count
        self._waiting = [fresh([states[count:]], axis=0)] if self._count else []

    def drop(self, end: int) -> None:
        """Forget states from position `end` on: the target goes back."""
        excess = self._offset + self._count - end
        if excess > 0:
            states = self._joined()
            self._count -= excess
            self._waiting = [states[: self._count]] if self._count else []

    def propose(self, count: int, picker: Picker) -> mx.array:
        """`count` tokens behind the row's last one, int32 `[count]`, lazy.

        Only when `ready`, and when the host knows the row's last token and the target's caches end before it.
        """
        row = self._row
        end = self._offset + self._count
        if end != row.position:
            raise RuntimeError(f"the draft knows {end} positions of a row whose caches hold {row.position}")
        anchor = mx.array([row.next_token], mx.int32)
        states = self._joined() if self._count else mx.zeros((0, 1))
        tokens = self._draft.propose(self._batch(self._count), states, anchor, count, picker)
        if not self._draft.facts.reads_target:
            self._offset, self._waiting, self._count = end, [], 0
        return tokens

    def _joined(self) -> mx.array:
        return self._waiting[0] if len(self._waiting) == 1 else mx.concatenate(self._waiting)

    def _batch(self, count: int) -> Batch:
        """The next `count` positions, with the tokens that belong to them."""
        start = self._offset + self._draft.facts.lookahead
        ids = self._row.tokens(start, start + count)
        if len(ids) < count:
            # A row that ended before its last token was read: the key of that pair of tokens matches no prompt.
            ids = np.pad(ids, (0, count - len(ids)))
        caches = self._row.caches if self._draft.facts.reads_target else self.caches
        return Batch.of(ids, [Span(0, count, self._offset, caches, self._row.layout)])


def prompt_batch(draft: Draft, parts: Sequence[tuple[Row, int, int]]) -> Batch:
    """Prompt tokens of several rows, each from a position on for a length, as `Draft.commit` takes them."""
    ahead = draft.facts.lookahead
    ids, spans, features, at = [], [], [], 0
    for row, start, length in parts:
        assert row.session is not None
        ids.append(row.tokens(start + ahead, start + ahead + length))
        spans.append(Span(at, length, start, row.session.caches, row.layout))
        if row.images is not None:
            features += row.images.features(start + ahead, length, at)
        at += length
    batch = Batch.of(np.concatenate(ids), spans)
    batch.features = features
    return batch
