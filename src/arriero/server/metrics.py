"""What the server counts, as Prometheus reads it (its text format, version 0.0.4).

Everything is counted on the server's loop, so nothing is locked. Labels hold routes, statuses and names of stored
models: never what a client made up, or the series would grow without end.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Counter:
    """A number for each set of labels that only grows."""

    def __init__(self, name: str, about: str, *labels: str) -> None:
        self.name, self.about, self.labels = name, about, labels
        self.values: dict[tuple[str, ...], float] = {}

    def add(self, amount: float, *values: str) -> None:
        """Add to the number with these values of the labels."""
        self.values[values] = self.values.get(values, 0) + amount

    def lines(self) -> Iterator[str]:
        """As text."""
        yield from _head(self.name, "counter", self.about)
        for values, number in self.values.items():
            yield _line(self.name, self.labels, values, number)


@dataclass(slots=True)
class _Heights:
    counts: list[int]
    """Observations at most as large as each bound, and above that before; the last has no bound."""
    total: float = 0.0


class Histogram:
    """How often a number lay between bounds, for each set of labels."""

    def __init__(self, name: str, about: str, bounds: Sequence[float], *labels: str) -> None:
        self.name, self.about, self.bounds, self.labels = name, about, tuple(bounds), labels
        self.values: dict[tuple[str, ...], _Heights] = {}

    def observe(self, number: float, *values: str, times: int = 1) -> None:
        """Count a number with these values of the labels, `times` times."""
        heights = self.values.get(values)
        if heights is None:
            heights = self.values[values] = _Heights([0] * (len(self.bounds) + 1))
        heights.counts[bisect_left(self.bounds, number)] += times
        heights.total += number * times

    def lines(self) -> Iterator[str]:
        """As text: every bucket counts those below it too."""
        yield from _head(self.name, "histogram", self.about)
        for values, heights in self.values.items():
            below = 0
            for bound, count in zip((*self.bounds, math.inf), heights.counts, strict=True):
                below += count
                yield _line(f"{self.name}_bucket", (*self.labels, "le"), (*values, _number(bound)), below)
            yield _line(f"{self.name}_sum", self.labels, values, heights.total)
            yield _line(f"{self.name}_count", self.labels, values, below)


@dataclass(frozen=True, slots=True)
class Reading:
    """A number that is looked up when it is asked for."""

    name: str
    about: str
    labels: tuple[str, ...]
    values: dict[tuple[str, ...], float]
    kind: str = "gauge"

    def lines(self) -> Iterator[str]:
        """As text."""
        yield from _head(self.name, self.kind, self.about)
        for values, number in self.values.items():
            yield _line(self.name, self.labels, values, number)


class Metrics:
    """Everything that one server counts."""

    def __init__(self) -> None:
        self.started = time.time()
        self.in_flight = 0
        """Requests that have come and are not answered to their end."""
        self.requests = Counter("arriero_requests_total", "HTTP requests that ended.", "method", "route", "status")
        self.request_seconds = Histogram(
            "arriero_request_seconds", "Time from a request to the end of its answer.", _SECONDS, "route"
        )
        self.replies = Counter(
            "arriero_replies_total",
            "Replies that ended, by how: stop, length, left (the client went away) or error.",
            "model",
            "reason",
        )
        self.prompt_tokens = Counter(
            "arriero_prompt_tokens_total",
            "Tokens of prompts answered to the end, and of texts to embed, cached ones included.",
            "model",
        )
        self.cached_tokens = Counter(
            "arriero_cached_tokens_total", "Tokens of prompts that were not computed again.", "model"
        )
        self.generated_tokens = Counter("arriero_generated_tokens_total", "Tokens of replies.", "model")
        self.first_token = Histogram(
            "arriero_time_to_first_token_seconds",
            "Time from a request to the first token of its reply, loads and queues included.",
            _SECONDS,
            "model",
        )
        self.per_token = Histogram(
            "arriero_time_per_token_seconds",
            "Time from a token to the next; those that came at once share theirs.",
            _TOKEN_SECONDS,
            "model",
        )

    def text(self, readings: Iterable[Reading]) -> str:
        """All numbers, and those that were looked up for it."""
        counted: tuple[Counter | Histogram, ...] = (
            self.requests,
            self.request_seconds,
            self.replies,
            self.prompt_tokens,
            self.cached_tokens,
            self.generated_tokens,
            self.first_token,
            self.per_token,
        )
        found = [line for series in counted for line in series.lines()]
        found += [line for reading in readings for line in reading.lines()]
        return "\n".join([*found, ""])


class ReplyMeter:
    """Counts one reply while it comes; `end` must be called once."""

    def __init__(self, metrics: Metrics, model: str, started_ns: int) -> None:
        """`started_ns` is when the request came, by `time.perf_counter_ns`."""
        self._metrics, self._model = metrics, model
        self._last = started_ns
        self._begun = False

    def tokens(self, count: int) -> None:
        """So many tokens have come at once."""
        if count <= 0:
            return
        now = time.perf_counter_ns()
        passed = (now - self._last) / 1e9
        if self._begun:
            self._metrics.per_token.observe(passed / count, self._model, times=count)
        else:
            self._metrics.first_token.observe(passed, self._model)
        self._begun, self._last = True, now
        self._metrics.generated_tokens.add(count, self._model)

    def prompt(self, total: int, cached: int) -> None:
        """What the reply's prompt took."""
        self._metrics.prompt_tokens.add(total, self._model)
        self._metrics.cached_tokens.add(cached, self._model)

    def end(self, reason: str) -> None:
        """How the reply ended."""
        self._metrics.replies.add(1, self._model, reason)


def _head(name: str, kind: str, about: str) -> tuple[str, str]:
    return f"# HELP {name} {about}", f"# TYPE {name} {kind}"


def _line(name: str, labels: Sequence[str], values: Sequence[str], number: float) -> str:
    pairs = ",".join(f'{label}="{_escaped(value)}"' for label, value in zip(labels, values, strict=True))
    return f"{name}{{{pairs}}} {_number(number)}" if pairs else f"{name} {_number(number)}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) else repr(value)
