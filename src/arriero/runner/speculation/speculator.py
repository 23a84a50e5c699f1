"""The engine's speculation: who drafts for which row, how many tokens, and what the drafts need to be told."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import cached_property

import mlx.core as mx

from arriero.model.contract import Draft, Hidden, Model, RowCaches
from arriero.runner.caches.foreign import ForeignCache
from arriero.runner.caches.snapshot import fresh
from arriero.runner.caches.state import WholeState
from arriero.runner.prefill import Chunk
from arriero.runner.row import Phase, Row
from arriero.runner.sampling import Sampler
from arriero.runner.speculation.controller import DepthController, Depths, WholeBlocks
from arriero.runner.speculation.fitting import within
from arriero.runner.speculation.lookup import LIMIT, Copies, Lookup
from arriero.runner.speculation.picks import Picker
from arriero.runner.speculation.rounds import Run, keeps_states, run_round, states_of
from arriero.runner.speculation.session import FLUSH, Session, prompt_batch
from arriero.runner.speculation.stats import Tally
from arriero.runner.speculation.verify import Proposal, Rule, rule_for

log = logging.getLogger(__name__)

LONGEST_CHAIN = 8
"""Drafts of a head that guesses one after another; none of the known ones is right further out."""


class Speculator:
    """Drafts for one row at a time, while no other row runs; keeps the drafts of all rows level.

    Without a draft it copies from the row's own text, where that repeats itself.
    """

    def __init__(
        self,
        model: Model,
        sampler: Sampler,
        draft: Draft | None = None,
        *,
        cap: int = 0,
        copies: Callable[[], Copies] = Lookup,
        depths: Depths | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`cap` is the most that is drafted in a round, 0 = as the draft says. `copies` makes what drafts for a row
        where there is no draft.
        """
        self._model = model
        self._sampler = sampler
        self.draft = draft
        self._clock = clock
        limit = LIMIT if draft is None else draft.facts.limit or LONGEST_CHAIN
        self._limit = min(limit, cap) if cap else limit
        whole = draft is not None and draft.facts.whole
        self.depths = depths or (
            WholeBlocks(self._limit) if whole else DepthController(self._limit, steady=draft is not None)
        )
        self._row: Row | None = None
        self._copies = copies
        self._lookup: Copies | None = None
        self._mark: float | None = None
        """When the latest round of `_row` was over; None where the next one's length says nothing."""
        self._resting = 0
        """Plain steps of `_row` that the depths need not be asked about."""
        self._rested = False
        """Whether `_mark` is older than the latest step."""
        self.rounds = self.judged = self.accepted = 0

    @property
    def kind(self) -> str:
        """What drafts."""
        return "lookup" if self.draft is None else self.draft.facts.architecture

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers whose outputs every forward must give."""
        return () if self.draft is None else self.draft.facts.taps

    @property
    def lookahead(self) -> int:
        """Tokens beyond a position that its stored state depends on."""
        return self.draft.facts.lookahead if self.draft is not None and self._owns_caches else 0

    @property
    def _owns_caches(self) -> bool:
        return self.draft is not None and not self.draft.facts.reads_target

    @property
    def round_bytes(self) -> int:
        """Memory of a round: whole states behind each of the most drafts that there can be, until one is chosen."""
        return self._limit * self._state_bytes

    @property
    def row_bytes(self) -> int:
        """Memory that a draft takes of each row besides the caches: states of the target that wait for it, and, where
        it looks ahead, the whole states from before the latest step.
        """
        if self.draft is None or not self._owns_caches:
            return 0
        draft, target = self.draft.facts, self._model.facts
        width = draft.state_width or max(len(draft.taps), 1) * target.hidden_size
        return FLUSH * width * target.dtype.size + (self._state_bytes if draft.lookahead else 0)

    @cached_property
    def _state_bytes(self) -> int:
        """Of a row's whole states, once."""
        caches = [cache for cache in self._model.new_caches() if isinstance(cache, WholeState)]
        for cache in caches:
            cache.get()
        return sum(cache.nbytes for cache in caches)

    def new_caches(self) -> RowCaches:
        """The draft's caches of a row, which are stored and restored with the target's."""
        return [] if self.draft is None or not self._owns_caches else self.draft.new_caches()

    def admit(self, row: Row, caches: RowCaches) -> None:
        """A row begins; its draft's caches stand where the target's do."""
        row.tally = Tally(self.kind)
        if self.draft is not None:
            row.session = Session(self.draft, row, caches)

    def before(self, rows: Sequence[Row]) -> None:
        """A forward of plain steps is about to be built."""
        if not self.lookahead:
            return
        for row in rows:
            row.undo = []
            for slot, cache in enumerate(row.caches):
                if cache is not None and keeps_states(cache) and cache.offset:
                    cache.plan([cache.offset])
                    row.undo.append((slot, cache.take()[0]))

    def follow(self, rows: Sequence[Row], chunks: Sequence[Chunk], hidden: Hidden) -> list[mx.array]:
        """Tell the drafts of a forward: one token of each of `rows`, then the chunks. Returns what must be evaluated
        with it.
        """
        if self.draft is None:
            return []
        states, count = states_of(hidden, self.taps), len(rows)
        outputs: list[mx.array] = []
        if rows:
            # Alone in memory: the chunks' states would stay as long as these.
            mine = fresh([states[:count]], axis=0) if chunks else states
            outputs.append(mine)
            for i, row in enumerate(rows):
                self._session(row).follow(mine if count == 1 else mine[i : i + 1])
        if chunks:
            outputs += self._follow_chunks(self.draft, chunks, states[count:])
        for row in rows:
            session = self._session(row)
            if session.waiting >= FLUSH:
                session.flush(row.known - self.lookahead)
                outputs += [array for cache in session.caches if cache is not None for array in cache.state()]
        return outputs

    def choose(self, rows: Sequence[Row]) -> int:
        """How many tokens to draft for the only row, 0 = take a plain step; its latest token need not be read."""
        if self._resting and len(rows) == 1 and rows[0] is self._row:
            self._resting -= 1
            return 0
        self._resting = 0
        row = rows[0] if len(rows) == 1 and rows[0].phase is Phase.DECODING else None
        if row is None or row.tally is None:
            self._row = None
            return 0
        if row is not self._row:
            self._begin(row)
        depth = self._depth(row, min(row.max_new - row.sampled - 1, self._limit))
        self._resting = 0 if depth else self.depths.rest()
        return depth

    def round(self, row: Row, depth: int) -> Run | None:
        """Draft `depth` tokens for a row whose last token the host knows, and judge them; None when there are none."""
        row.undo = []
        rule = self._rule(row)
        proposal = self._propose(row, depth, rule)
        if proposal is not None and row.constraint is not None:
            proposal = within(row.constraint, proposal, rule)
        if proposal is None:
            return None
        run = run_round(
            self._model,
            self._sampler,
            row,
            proposal,
            rule,
            self.taps,
            states=self.draft is not None,
        )
        if run.states is not None:
            self._session(row).follow(run.states)
        self._count(row, run)
        return run

    def stepped(self, row: Row) -> None:
        """The token of a plain step has been read."""
        if row is not self._row or row.tally is None:
            return
        if self._resting:
            self._rested = True
            row.tally.step(0.0)
            return
        rested, seconds = self._rested, self._lap()
        if seconds is not None and not rested:
            self.depths.observe(0, 0, 0, 1, seconds)
        row.tally.step(seconds or 0.0)

    def settle(self, row: Row) -> None:
        """A row is over: bring its caches and its draft's to one offset, up to which the draft knows everything."""
        if row is self._row:
            self._row = None
        if row.tally is not None:
            log.log(logging.INFO if row.tally.rounds else logging.DEBUG, "row %s: %s", row.id, row.tally)
        session = row.session
        if session is None or not self._owns_caches:
            return
        end = min(row.position, row.known - self.lookahead)
        if end < row.position and self._back(row, end):
            row.position = end
        session.drop(row.position)
        session.flush(row.position)

    def _begin(self, row: Row) -> None:
        self._row, self._mark = row, None
        self._resting, self._rested = 0, False
        self._lookup = None
        self.depths.begin()

    def _depth(self, row: Row, most: int) -> int:
        """Drafts of a row's next round, at most `most`."""
        if self.draft is not None:
            return self.depths.next(most) if most > 0 and self._session(row).ready else 0
        ahead = row.sampled - row.generated
        found = len(self._known(row).find(most + ahead)) - ahead if most > 0 else 0
        return self.depths.next(found) if found > 0 else 0

    def _known(self, row: Row) -> Copies:
        """The search in the row's text, up to what has been read."""
        if self._lookup is None:
            self._lookup = self._copies()
        held = self._lookup.held
        self._lookup.extend(row.tokens(held, row.known))
        return self._lookup

    def _propose(self, row: Row, depth: int, rule: Rule) -> Proposal | None:
        if self.draft is None:
            found = self._known(row).find(depth)
            return Proposal(mx.array(found, mx.int32), host=found) if found else None
        session = self._session(row)
        picker = Picker(
            self._sampler,
            row.id,
            rule,
            temperature=row.request.sampling.temperature,
            vocab_size=self._model.facts.vocab_size,
            conditional=self.draft.facts.conditional,
        )
        tokens = session.propose(depth, picker)
        return Proposal(tokens, picker.law)

    def _rule(self, row: Row) -> Rule:
        drawn = self.draft is not None and self.draft.facts.conditional
        return rule_for(row.request.sampling, drawn=drawn)

    def _follow_chunks(self, draft: Draft, chunks: Sequence[Chunk], states: mx.array) -> list[mx.array]:
        if draft.facts.reads_target:
            at = 0
            lasts = []
            for chunk in chunks:
                at += chunk.length
                lasts.append(fresh([states[at - 1 : at]], axis=0))
                self._session(chunk.row).skipped(chunk.length, lasts[-1])
            return lasts
        draft.commit(prompt_batch(draft, [(chunk.row, chunk.start, chunk.length) for chunk in chunks]), states)
        for chunk in chunks:
            self._session(chunk.row).told(chunk.length)
        return []

    def _count(self, row: Row, run: Run) -> None:
        rested, seconds = self._rested, self._lap()
        if seconds is not None and not rested:
            self.depths.observe(run.drafted, run.accepted, run.judged, len(run.tokens), seconds)
        assert row.tally is not None
        row.tally.add(run.drafted, run.accepted, run.judged)
        self.rounds += 1
        self.judged += run.judged
        self.accepted += run.accepted

    def _lap(self) -> float | None:
        now, before = self._clock(), self._mark
        self._mark, self._rested = now, False
        return None if before is None else now - before

    def _session(self, row: Row) -> Session:
        assert row.session is not None
        return row.session

    def _back(self, row: Row, end: int) -> bool:
        """Take the target's caches back by a step that nobody will read; False, and nothing done, when one can't."""
        undo = dict(row.undo)
        if end and any(keeps_states(cache) and slot not in undo for slot, cache in enumerate(row.caches)):
            return False
        return all(cache.rewind(end, undo.get(slot)) for slot, cache in enumerate(row.caches) if cache is not None)


class Together:
    """What makes the caches of a row: the target's, and behind them its draft's."""

    def __init__(self, model: Model, speculator: Speculator | None) -> None:
        self._model = model
        self._speculator = speculator

    def new_caches(self) -> RowCaches:
        """Fresh ones."""
        drafts = [] if self._speculator is None else self._speculator.new_caches()
        return [*self._model.new_caches(), *drafts]


def supports(model: Model) -> bool:
    """Whether a model's caches can take tokens back; those of other packages stop at each token to do so."""
    return not any(isinstance(cache, ForeignCache) for cache in model.new_caches())
