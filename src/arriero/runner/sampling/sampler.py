"""The sampler of a runner: which row draws how, and one lazy array of tokens for all of them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from arriero.kernels.readable import read, readable
from arriero.kernels.topk import argmax
from arriero.runner.messages import SamplingOptions, TokenLogprob
from arriero.runner.sampling.distribution import Distribution
from arriero.runner.sampling.history import History
from arriero.runner.sampling.logprobs import Logprobs, logprobs, to_messages
from arriero.runner.sampling.masks import ruled_out
from arriero.runner.sampling.randomness import Stream, fresh_seed, keys, uniform
from arriero.runner.sampling.transforms import Parameters, Rules, distribution, penalise, rules

PLANS = 64
"""Sets of rows whose grouping is remembered; a running batch needs one."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """Drawn tokens `[n]` int32, lazy, in the order of the rows, and log-probabilities of the rows that asked."""

    tokens: mx.array
    logprobs: Logprobs | None = None
    asked: tuple[tuple[int, int], ...] = ()
    """For each row of `logprobs`: its index among the n, and how many alternatives it wants."""
    copies: list[mx.array] = field(init=False)
    """Of the tokens, where the host had better read those."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "copies", readable(self.tokens))

    def arrays(self) -> list[mx.array]:
        """What to evaluate."""
        return [self.tokens, *self.copies, *([] if self.logprobs is None else self.logprobs.arrays())]

    def read_tokens(self) -> list[int]:
        """The tokens on the host; waits for the device."""
        return read(self.tokens, self.copies)

    def read_logprobs(self) -> list[TokenLogprob | None] | None:
        """One entry a row on the host, None for a row that did not ask; None when no row asked. Waits."""
        if self.logprobs is None:
            return None
        entries: list[TokenLogprob | None] = [None] * self.tokens.shape[0]
        messages = to_messages(self.logprobs, [wanted for _, wanted in self.asked])
        for (row, _), message in zip(self.asked, messages, strict=True):
            entries[row] = message
        return entries


@dataclass(slots=True)
class _Row:
    rules: Rules
    stream: Stream
    alternatives: int | None
    """Top log-probabilities wanted; None = no log-probabilities at all."""


@dataclass(slots=True)
class _Group:
    """Rows of one shape: they are transformed together."""

    ids: list[Hashable]
    places: mx.array | None
    """Which rows of the batch; None = all of them, in order."""
    parameters: Parameters
    streams: list[Stream]
    lines: mx.array | None
    """Their lines in the history; None without penalties."""


@dataclass(slots=True)
class _Plan:
    """How one set of rows is sampled."""

    groups: list[_Group]
    order: mx.array | None
    """Where in the concatenation of the groups each row is; None when it is in order."""
    asked: tuple[tuple[int, int], ...]
    asking: mx.array | None
    """Rows that want log-probabilities; None = all."""
    alternatives: int


class Sampler:
    """Draws tokens for rows, each with its own options, history and random numbers.

    A seeded row's tokens depend on its seed, its logits and its number of draws, never on the rows beside it. Nothing
    here waits for the device: tokens may feed the next forward, and the penalties of the next draw, before anybody has
    read them.
    """

    def __init__(self, vocab_size: int, context_length: int) -> None:
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._rows: dict[Hashable, _Row] = {}
        self._history = History()
        self._plans: dict[tuple[Hashable, ...], _Plan] = {}

    def add(
        self, row: Hashable, options: SamplingOptions, prompt: Sequence[int], context_length: int | None = None
    ) -> None:
        """Take in a row whose history starts with its prompt.

        `context_length` is what a `repeat_last_n` of −1 means; by default the sampler's. Raises InvalidRequest for an
        option that is no finite number, ValueError for a row that is here already.
        """
        if row in self._rows:
            raise ValueError(f"row {row!r} is being sampled already")
        chosen = rules(options, self._vocab_size, context_length or self._context_length)
        stream = Stream(options.seed if options.seed >= 0 else fresh_seed())
        self._rows[row] = _Row(chosen, stream, max(options.top_logprobs, 0) if options.logprobs else None)
        if chosen.window:
            self._history.add(row, chosen.window, prompt)

    def remove(self, row: Hashable) -> None:
        """Forget a row; nothing happens for one that is not here."""
        if self._rows.pop(row, None) is not None:
            self._history.remove(row)
            self._plans.clear()

    def sample(
        self, rows: Sequence[Hashable], logits: mx.array, allowed: Mapping[Hashable, np.ndarray] | None = None
    ) -> Sampled:
        """One token for each of `rows` from its line of `logits` `[n, vocab]`, and its history moved on.

        `allowed` holds the tokens that some rows may draw, bool `[vocab]`; they are ruled out of the scores after the
        penalties, so that every rule acts on what the row can say. Log-probabilities stay those of the model.
        ValueError for another number of lines, and for a row that was not added.
        """
        if logits.shape[0] != len(rows):
            raise ValueError(f"{logits.shape[0]} rows of logits for {len(rows)} rows")
        plan = self._plan(tuple(rows))
        drawn = [
            self._draw(
                group,
                logits if group.places is None else logits[group.places],
                self._allowed(group, allowed) if allowed else None,
            )
            for group in plan.groups
        ]
        tokens = drawn[0] if len(drawn) == 1 else mx.concatenate(drawn)
        if plan.order is not None:
            tokens = tokens[plan.order]
        if not plan.asked:
            return Sampled(tokens)
        if plan.asking is None:
            return Sampled(tokens, logprobs(logits, tokens, plan.alternatives), plan.asked)
        found = logprobs(logits[plan.asking], tokens[plan.asking], plan.alternatives)
        return Sampled(tokens, found, plan.asked)

    def largest(self, rows: Sequence[Hashable]) -> bool:
        """Whether each of these rows draws its largest logit, and nothing is asked about it or kept of it."""
        plan = self._plan(tuple(rows))
        (group, *others) = plan.groups
        return not others and not plan.asked and group.parameters.greedy and group.lines is None

    def drawn(self, tokens: mx.array) -> Sampled:
        """Tokens `[n]` int32 that rows have drawn of which `largest` said so."""
        return Sampled(tokens)

    def distribution(
        self, row: Hashable, logits: mx.array, chain: mx.array | None = None, allowed: mx.array | None = None
    ) -> Distribution:
        """What a row would draw from at each line of `logits` `[r, vocab]`; nothing changes.

        With `chain`, drafts `[d]` after the row's history, the last line stands behind all of them and each earlier one
        behind a draft fewer. ValueError for more lines than places in the chain. `allowed` bool `[r, vocab]` rules
        tokens out after the penalties, as in `sample`.
        """
        found = self._row(row)
        count = logits.shape[0]
        if chain is not None and count > chain.shape[0] + 1:
            raise ValueError(f"{count} lines of logits over a chain of {chain.shape[0]} drafts")
        parameters = Parameters([found.rules])
        # A cast to float32 does not change which score is the largest.
        scores = logits if parameters.greedy and not found.rules.window else logits.astype(mx.float32)
        if found.rules.window:
            if chain is None:
                seen = self._history.tokens(self._history.lines([row]))
                seen = mx.broadcast_to(seen, (count, seen.shape[1]))
            else:
                seen = self._history.chained(row, chain, count)
            scores = penalise(scores, seen, parameters)
        if allowed is not None:
            scores = mx.where(allowed, scores, mx.array(-mx.inf, scores.dtype))
        return distribution(scores, parameters)

    def draw(self, row: Hashable, source: Distribution) -> mx.array:
        """A token from each row of a distribution, `[r]` int32, with the row's own random numbers."""
        stream = self._row(row).stream
        return source.draw(keys([stream.next() for _ in range(source.rows)]))

    def peek(self, row: Hashable, source: Distribution, ahead: int = 0) -> mx.array:
        """What `draw` would give after `ahead` more draws of the row; nothing changes until `skip`."""
        stream = self._row(row).stream
        return source.draw(keys([stream.peek(ahead + i) for i in range(source.rows)]))

    def skip(self, row: Hashable, draws: int) -> None:
        """Count draws that were taken with `peek`."""
        self._row(row).stream.counter += draws

    def accept(self, row: Hashable, chance: mx.array) -> mx.array:
        """True with each of the probabilities `chance` `[d]` (1 and more = always), one draw for all of them."""
        return uniform(keys([self._row(row).stream.next()]), chance.shape[0])[0] < chance

    def commit(self, row: Hashable, tokens: mx.array) -> None:
        """Append tokens `[m]` that were chosen elsewhere (accepted drafts) to a row's history."""
        self._row(row)
        if row in self._history:
            self._history.commit(row, tokens)

    def described(self, row: Hashable, logits: mx.array, tokens: mx.array) -> Sampled:
        """Tokens `[n]` of one row that were chosen elsewhere, with the log-probabilities that it asked for.

        Each comes from its line of `logits` `[n, vocab]`.
        """
        wanted = self._row(row).alternatives
        if wanted is None:
            return Sampled(tokens)
        asked = tuple((place, wanted) for place in range(tokens.shape[0]))
        return Sampled(tokens, logprobs(logits, tokens, wanted), asked)

    def _row(self, row: Hashable) -> _Row:
        found = self._rows.get(row)
        if found is None:
            raise ValueError(f"row {row!r} was not added to the sampler")
        return found

    def _allowed(self, group: _Group, allowed: Mapping[Hashable, np.ndarray]) -> np.ndarray | None:
        """The tokens that the rows of a group may draw, bool `[n, vocab]`; None where all may."""
        if not any(row in allowed for row in group.ids):
            return None
        every = np.ones(self._vocab_size, bool)
        return np.stack([allowed.get(row, every) for row in group.ids])

    def _draw(self, group: _Group, logits: mx.array, allowed: np.ndarray | None = None) -> mx.array:
        # A cast to float32 does not change which score is the largest.
        scores = logits if group.parameters.greedy else logits.astype(mx.float32)
        if group.lines is not None:
            scores = penalise(scores.astype(mx.float32), self._history.tokens(group.lines), group.parameters)
        if allowed is not None:
            scores = ruled_out(scores, allowed)
        if group.parameters.greedy:
            tokens = argmax(scores).view(mx.int32)  # indices are below 2³¹
        else:
            source = distribution(scores, group.parameters)
            tokens = source.draw(keys([stream.next() for stream in group.streams]))
        if group.lines is not None:
            self._history.push(group.ids, group.lines, tokens)
        return tokens

    def _plan(self, rows: tuple[Hashable, ...]) -> _Plan:
        plan = self._plans.get(rows)
        if plan is None:
            if len(self._plans) >= PLANS:
                self._plans.clear()
            plan = self._plans[rows] = self._made(rows)
        return plan

    def _made(self, rows: tuple[Hashable, ...]) -> _Plan:
        if len(set(rows)) != len(rows):
            raise ValueError(f"a row is sampled once a step; got {list(rows)}")
        found = [self._row(row) for row in rows]
        shapes: dict[object, list[int]] = {}
        for place, row in enumerate(found):
            shapes.setdefault((row.rules.window > 0, row.rules.shape), []).append(place)
        groups = [self._group(rows, found, places) for places in shapes.values()]
        arranged = [place for places in shapes.values() for place in places]
        order = None
        if arranged != sorted(arranged):
            order = mx.array([arranged.index(place) for place in range(len(rows))], mx.int32)
        asked = [(place, row.alternatives) for place, row in enumerate(found) if row.alternatives is not None]
        asking = mx.array([place for place, _ in asked], mx.int32) if 0 < len(asked) < len(rows) else None
        return _Plan(groups, order, tuple(asked), asking, max((wanted for _, wanted in asked), default=0))

    def _group(self, rows: tuple[Hashable, ...], found: list[_Row], places: list[int]) -> _Group:
        ids = [rows[place] for place in places]
        members = [found[place] for place in places]
        return _Group(
            ids,
            None if len(places) == len(rows) else mx.array(places, mx.int32),
            Parameters([row.rules for row in members]),
            [row.stream for row in members],
            self._history.lines(ids) if members[0].rules.window else None,
        )
