"""Requests and forwards that take turns in short pieces, so that whatever else a machine does hits all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

from arriero.runner.engine import Engine
from arriero.runner.messages import Failed, Finished, SamplingOptions, Submit, Tokens

GREEDY = SamplingOptions(temperature=0)


class Stopwatch:
    """Seconds that count only within `with`: a clock for what stands still in between."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = None

    def __call__(self) -> float:
        return self._seconds + (0.0 if self._since is None else time.perf_counter() - self._since)

    def __enter__(self) -> Self:
        self._since = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._seconds, self._since = self(), None


class Piecewise(Protocol):
    """Work that goes on a piece at a time."""

    def piece(self) -> tuple[int, float] | None:
        """Tokens of the next piece and its seconds; None at the end."""
        ...


@dataclass
class Turn:
    """One request in an engine of its own, from its first token on."""

    engine: Engine
    watch: Stopwatch
    """What the engine's speculator has as its clock, if it has one."""
    prompt: list[int]
    count: int
    steps: int
    """Of the engine, in a piece."""
    reply: list[int] = field(default_factory=list)
    end: Finished | None = None

    def __post_init__(self) -> None:
        request = Submit(id="turn", tokens=self.prompt, max_tokens=self.count, stop_tokens=[], sampling=GREEDY)
        self.engine.submit(request)
        while not self.reply and self.end is None:
            with self.watch:
                self.engine.step()
            self._take()

    def piece(self) -> tuple[int, float] | None:
        if self.end is not None:
            return None
        before, started = len(self.reply), self.watch()
        with self.watch:
            for _ in range(self.steps):
                if self.engine.busy:
                    self.engine.step()
        self._take()
        return len(self.reply) - before, self.watch() - started

    def _take(self) -> None:
        for message in self.engine.drain():
            if isinstance(message, Tokens):
                self.reply += message.tokens
            elif isinstance(message, Finished):
                self.end = message
            elif isinstance(message, Failed):
                raise RuntimeError(message.message)


@dataclass
class Pairs:
    """What pieces of two that took turns took, side by side."""

    first: list[tuple[int, float]] = field(default_factory=list)
    second: list[tuple[int, float]] = field(default_factory=list)

    def median_ratio(self) -> float:
        """Seconds of a piece of the first by those of the second beside it; the first pairs warm up."""
        ratios = [a / b for (_, a), (_, b) in zip(self.first[2:], self.second[2:], strict=False)]
        return statistics.median(ratios)

    def speed_ratio(self) -> float:
        """Tokens a second of the second, all of its pieces, as a part of the first's."""
        return _speed(self.second) / _speed(self.first)


def in_turns(first: Piecewise, second: Piecewise) -> Pairs:
    """Pieces of both until both are at their end; who begins changes with every pair."""
    pairs = Pairs()
    both: list[tuple[Piecewise, list[tuple[int, float]]]] = [(first, pairs.first), (second, pairs.second)]
    going = True
    while going:
        going = False
        for work, found in both:
            piece = work.piece()
            if piece is not None:
                found.append(piece)
                going = True
        both.reverse()
    return pairs


def _speed(pieces: Sequence[tuple[int, float]]) -> float:
    return sum(tokens for tokens, _ in pieces) / max(sum(seconds for _, seconds in pieces), 1e-9)
