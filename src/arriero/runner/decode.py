"""The decode pipeline: the next forward starts from sampled tokens that the host has not read yet.

One `Flight` is one forward. The engine builds flight k + 1 before it reads flight k, and launches it before, too, where
launching does not block, so that the device never waits for the host; a row that turns out to have stopped in flight k
then takes part in k + 1 for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import mlx.core as mx
import numpy as np

from arriero.kernels.device import cuda
from arriero.kernels.topk import argmax
from arriero.model.contract import Batch, Cache, Hidden, Model, Span
from arriero.runner.caches.linear import LinearCache
from arriero.runner.messages import SamplingOptions, TokenLogprob
from arriero.runner.prefill import Chunk
from arriero.runner.row import Phase, Row
from arriero.runner.speculation.speculator import Speculator


class Sampled(Protocol):
    """The draws of one step, lazy until they are read."""

    @property
    def tokens(self) -> mx.array:
        """The chosen ids, int32 `[n]`."""
        ...

    def arrays(self) -> list[mx.array]:
        """Everything that a read needs."""
        ...

    def read_tokens(self) -> list[int]: ...

    def read_logprobs(self) -> list[TokenLogprob | None] | None: ...


class Sampler(Protocol):
    """What the engine asks of `runner/sampling`."""

    def add(self, row: str, options: SamplingOptions, prompt: Sequence[int]) -> None: ...

    def remove(self, row: str) -> None: ...

    def sample(
        self, rows: Sequence[str], logits: mx.array, allowed: Mapping[Hashable, np.ndarray] | None = None
    ) -> Sampled: ...

    def largest(self, rows: Sequence[str]) -> bool:
        """Whether each of these rows draws its largest logit, and nothing else is asked."""
        ...

    def drawn(self, tokens: mx.array) -> Sampled:
        """Those, drawn elsewhere."""
        ...


@dataclass(slots=True)
class Flight:
    """A forward whose results have not been read."""

    rows: list[Row]
    """Rows that decoded one token, in the order of `sampled`."""
    sampled: Sampled | None
    chunks: list[Chunk]
    marker: mx.array | None
    """Evaluated when the chunks' cache states are; None without chunks."""
    outputs: list[mx.array]
    """What a launch evaluates; empty afterwards, since holding the buffers would make the next write copy them."""
    logits: mx.array | None = None
    """Lines of `rows` that wait for the tokens of the flight before to be known, because a row has a grammar."""

    @property
    def wanted(self) -> bool:
        """Whether any of its rows still runs."""
        rows = [*self.rows, *(chunk.row for chunk in self.chunks)]
        return any(row.phase is not Phase.DONE for row in rows)

    def launch(self) -> None:
        """Send it to the device."""
        outputs, self.outputs = self.outputs, []
        mx.async_eval(*outputs)  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Block until the device has computed this flight; raises what the computation raised."""
        arrays = [] if self.marker is None else [self.marker]
        if self.sampled is not None:
            arrays.append(self.sampled.tokens)
        mx.eval(arrays)


@dataclass(slots=True)
class Pipeline:
    """Builds forwards that continue from the latest flight."""

    model: Model
    sampler: Sampler
    speculator: Speculator | None = None
    """Its drafts are told of every forward."""
    latest: Flight | None = None
    _marker: mx.array = field(default_factory=lambda: mx.zeros(1))
    _best: Callable[[mx.array], mx.array] | None = None
    """From final states to the largest logits' tokens as one recorded graph, where Python is what a step waits for."""

    def __post_init__(self) -> None:
        if cuda() is not None:
            model = self.model
            self._best = mx.compile(lambda hidden: argmax(model.logits(hidden)).view(mx.int32))

    def build(self, rows: list[Row], chunks: list[Chunk], settle: bool) -> Flight:
        """The graph of one forward: a token for each of `rows`, then the prompt tokens of `chunks`.

        Rows that took part in the latest flight come first; of the others the host knows the next token.
        `settle` also evaluates the decoding rows' cache states, so that no state stays lazy for the life of a row.
        """
        # A replayed step writes where the one before does, and depends on it by its tokens at most: it is on its way.
        assert self.latest is None or not self.latest.outputs, "the forward before has not been launched"
        if self.speculator is not None:
            self.speculator.before(rows)
        # On NVIDIA GPUs prompts have a forward of their own: those of rows with a token each are replayed.
        apart = bool(rows and chunks) and cuda() is not None
        beside = [] if apart else chunks
        result = self._forward(rows, beside)
        hidden = result.final

        sampled = None
        outputs: list[mx.array] = []
        logits = None
        if rows:
            last, ids = hidden if len(rows) == hidden.shape[0] else hidden[: len(rows)], [row.id for row in rows]
            if any(row.constraint is not None for row in rows):
                logits = self.model.logits(last)
                outputs.append(logits)
            else:
                if self._best is not None and self.sampler.largest(ids):
                    sampled = self.sampler.drawn(self._best(last))
                else:
                    sampled = self.sampler.sample(ids, self.model.logits(last))
                outputs += sampled.arrays()
        if self.speculator is not None:
            outputs += self.speculator.follow(rows, beside, result)
        if apart:
            # On its way before the host turns to the prompts.
            mx.async_eval(*outputs)  # type: ignore[no-untyped-call]
            result = self._forward([], chunks)
            if self.speculator is not None:
                outputs += self.speculator.follow([], chunks, result)
        settled = [cache for chunk in chunks for cache in chunk.row.held if cache is not None]
        if settle:
            settled += [
                cache for row in rows for cache in row.held if cache is not None and not _written_in_place(cache)
            ]
        states = [array for cache in settled for array in cache.state()]
        marker = None
        if chunks:
            # Waiting on the states themselves would keep a second reference to the buffers that the next write reuses.
            marker = mx.depends(self._marker, states) if states else self._marker
            outputs.append(marker)
        elif states:
            outputs += states

        for slot, row in enumerate(rows):
            row.slot = slot
            row.position += 1
            row.sampled += 1
        for chunk in chunks:
            chunk.row.position = chunk.end
        self.latest = Flight(rows, sampled, chunks, marker, outputs, logits)
        return self.latest

    def sample(self, flight: Flight, allowed: Mapping[Hashable, np.ndarray]) -> None:
        """Draw for a flight that could not do so when it was built; `allowed` says what rows with a grammar may say.

        Rows that have ended meanwhile take no part.
        """
        logits, flight.logits = flight.logits, None
        rows = [row for row in flight.rows if row.phase is not Phase.DONE]
        if logits is None or not rows:
            flight.rows = rows
            return
        if len(rows) != len(flight.rows):
            logits = logits[mx.array([slot for slot, row in enumerate(flight.rows) if row.phase is not Phase.DONE])]
            flight.rows = rows
            for slot, row in enumerate(rows):
                row.slot = slot
        flight.sampled = self.sampler.sample([row.id for row in rows], logits, allowed)
        mx.async_eval(*flight.sampled.arrays())  # type: ignore[no-untyped-call]

    def _forward(self, rows: list[Row], chunks: list[Chunk]) -> Hidden:
        """One token of each of `rows`, then the chunks."""
        spans = [Span(i, 1, row.position, row.caches, row.layout) for i, row in enumerate(rows)]
        at = len(rows)
        for chunk in chunks:
            spans.append(Span(at, chunk.length, chunk.start, chunk.row.caches, chunk.row.layout))
            at += chunk.length
        batch = self._batch(rows, chunks, spans)
        batch.taps = () if self.speculator is None else self.speculator.taps
        owners = [*rows, *(chunk.row for chunk in chunks)]
        batch.features = [
            feature
            for row, span in zip(owners, spans, strict=True)
            if row.images is not None
            for feature in row.images.features(span.position, span.length, span.start)
        ]
        return self.model.forward(batch)

    def _batch(self, rows: list[Row], chunks: list[Chunk], spans: list[Span]) -> Batch:
        """The packed tokens `[T]`: the latest samples, then tokens that the host knows, then the chunks."""
        latest = self.latest
        lazy = latest.sampled.tokens if latest is not None and latest.sampled is not None else None
        if lazy is not None and not chunks and latest is not None and rows == latest.rows:
            return Batch(lazy, spans)
        host = [np.array([row.next_token], np.int32) for row in rows if row.slot is None]
        host += [chunk.row.prompt[chunk.start : chunk.end] for chunk in chunks]
        running = [row.slot for row in rows if row.slot is not None]
        if lazy is None or not running:
            return Batch.of(np.concatenate(host), spans)
        picks = mx.take(lazy, mx.array(np.array(running, np.int32)))
        return Batch(mx.concatenate([picks, mx.array(np.concatenate(host))]) if host else picks, spans)


def _written_in_place(cache: Cache) -> bool:
    """Whether a cache's buffers are computed already, and only what is in them is being written."""
    return isinstance(cache, LinearCache) and cache.written is not None
