"""Texts to vectors: queued requests, packed into forwards by length, one forward a step.

Works with encoders and with models that generate. Token ids in, messages out; for the array thread alone.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import mlx.core as mx
import numpy as np

from arriero.errors import ArrieroError, Cancelled, InvalidRequest, PromptTooLong
from arriero.model.contract import Batch, Encoder, Model, Span
from arriero.runner.messages import Embed, Embedded, Failed, FromRunner, Pooling


class States(Protocol):
    """What gives the states of texts."""

    vocab_size: int

    def __call__(self, texts: list[np.ndarray], pooling: Pooling) -> mx.array:
        """Vectors float32 `[n, hidden]` of texts int32, lazily or not."""
        ...


class EncoderStates:
    """The states of an encoder: all texts in one forward."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self.vocab_size = encoder.facts.vocab_size

    def __call__(self, texts: list[np.ndarray], pooling: Pooling) -> mx.array:
        lengths = [len(text) for text in texts]
        states = self._encoder.encode(mx.array(np.concatenate(texts)), lengths).astype(mx.float32)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        if pooling == "cls":
            pooled = states[mx.array(starts[:-1].astype(np.int32))]
        elif pooling == "last":
            pooled = states[mx.array(starts[1:].astype(np.int32) - 1)]
        else:
            pooled = mx.stack([states[a:b].mean(axis=0) for a, b in pairwise(starts)])
        return self._encoder.finish(pooled)


class ModelStates:
    """The final states of a model that generates: each text in chunks over caches of its own."""

    def __init__(self, model: Model, chunk: int) -> None:
        self._model = model
        self._chunk = chunk
        self.vocab_size = model.facts.vocab_size

    def __call__(self, texts: list[np.ndarray], pooling: Pooling) -> mx.array:
        if sum(map(len, texts)) <= self._chunk:
            return self._together(texts, pooling)
        return mx.concatenate([self._alone(text, pooling) for text in texts])

    def _together(self, texts: list[np.ndarray], pooling: Pooling) -> mx.array:
        spans, at = [], 0
        for text in texts:
            spans.append(Span(at, len(text), 0, self._model.new_caches()))
            at += len(text)
        states = self._model.forward(Batch.of(np.concatenate(texts), spans)).final.astype(mx.float32)
        return mx.stack([_pooled(states[span.start : span.start + span.length], pooling) for span in spans])

    def _alone(self, text: np.ndarray, pooling: Pooling) -> mx.array:
        caches, total, first, last = self._model.new_caches(), None, None, None
        for start in range(0, len(text), self._chunk):
            part = text[start : start + self._chunk]
            batch = Batch.of(part, [Span(0, len(part), start, caches)])
            states = self._model.forward(batch).final.astype(mx.float32)
            summed = states.sum(axis=0)
            total = summed if total is None else total + summed
            first, last = states[0] if first is None else first, states[-1]
            mx.eval(total, first, last, [array for cache in caches if cache is not None for array in cache.state()])
        assert total is not None
        found = {"mean": total / len(text), "cls": first, "last": last}[pooling]
        assert found is not None
        return found[None]


def _pooled(states: mx.array, pooling: Pooling) -> mx.array:
    if pooling == "mean":
        return states.mean(axis=0)
    return states[0] if pooling == "cls" else states[-1]


@dataclass(slots=True)
class _Job:
    request: Embed
    order: list[int]
    """Which text comes next, the shortest first."""
    done: dict[int, np.ndarray] = field(default_factory=dict)


class Embeddings:
    """Requests in their order; each step computes as many texts of the first one as a forward takes."""

    def __init__(self, states: States, context_length: int, budget: int) -> None:
        """`budget` is the tokens of one forward; a longer text has one for itself."""
        self._states = states
        self._budget = budget
        self.context_length = context_length
        self._jobs: deque[_Job] = deque()

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._jobs)

    @property
    def ids(self) -> list[str]:
        """The requests that are not answered yet."""
        return [job.request.id for job in self._jobs]

    def submit(self, request: Embed) -> Failed | None:
        """Queue a request; what is wrong with it otherwise."""
        try:
            self._check(request)
        except ArrieroError as error:
            return Failed(request.id, type(error).__name__, str(error))
        order = sorted(range(len(request.texts)), key=lambda index: len(request.texts[index]))
        self._jobs.append(_Job(request, order))
        return None

    def cancel(self, request_id: str) -> Failed | None:
        """Forget a request and give its end; None when it isn't here."""
        for job in self._jobs:
            if job.request.id == request_id:
                self._jobs.remove(job)
                return Failed(request_id, Cancelled.__name__, "the request was cancelled")
        return None

    def drop(self) -> list[str]:
        """Forget everything; the ids of what was here."""
        ids = self.ids
        self._jobs.clear()
        return ids

    def step(self) -> list[FromRunner]:
        """One forward, and the answer of a request that is done with it. Raises what the forward raises."""
        if not self._jobs:
            return []
        job = self._jobs[0]
        batch: list[int] = []
        tokens = 0
        while job.order and (not batch or tokens + len(job.request.texts[job.order[0]]) <= self._budget):
            batch.append(job.order.pop(0))
            tokens += len(job.request.texts[batch[-1]])
        if batch:
            texts = [np.array(job.request.texts[index], np.int32) for index in batch]
            job.done |= dict(zip(batch, np.array(self._states(texts, job.request.pooling)), strict=True))
        if job.order:
            return []
        self._jobs.popleft()
        vectors = [job.done[index] for index in range(len(job.done))]
        width = vectors[0].shape[0] if vectors else 0
        data = b"".join(vector.astype("<f4").tobytes() for vector in vectors)
        return [Embedded(job.request.id, width, data)]

    def _check(self, request: Embed) -> None:
        for index, text in enumerate(request.texts):
            if not text:
                raise InvalidRequest(f"text {index} is empty: it has no tokens")
            if len(text) > self.context_length:
                raise PromptTooLong(f"text {index} has {len(text)} tokens, but the context holds {self.context_length}")
            if min(text) < 0 or max(text) >= self._states.vocab_size:
                raise InvalidRequest(
                    f"text {index} holds a token id outside the model's, 0 to {self._states.vocab_size - 1}"
                )
