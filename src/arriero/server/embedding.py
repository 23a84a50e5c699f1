"""The way of texts to their vectors, the same for every API. Refuses to know wire formats."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from arriero.errors import InvalidRequest, PromptTooLong, RunnerCrashed
from arriero.runner.messages import Embed, Embedded, Failed
from arriero.scheduler import Lease, error_of
from arriero.server.completion import load_request
from arriero.server.models import OpenModel
from arriero.server.services import Services


@dataclass(frozen=True, slots=True)
class Vectors:
    """Vectors of texts, and what they took. Times are nanoseconds."""

    rows: np.ndarray
    """float32 `[n, width]`, in the order of the texts."""
    tokens: int
    """Of all texts, special ones included."""
    total_ns: int
    load_ns: int


async def embed(
    services: Services,
    model: OpenModel,
    texts: Sequence[str],
    *,
    truncate: bool = True,
    dimensions: int = 0,
    normalise: bool = True,
    num_ctx: int = 0,
    keep_alive: float | None = None,
) -> Vectors:
    """Vectors of texts; `dimensions` keeps the first numbers of each, 0 = all.

    A text that is longer than the context loses its end, or is PromptTooLong with `truncate` False. Raises
    UnsupportedFeature for a model that makes none, InvalidRequest for a text without tokens, for more dimensions than
    there are and for vectors that are no numbers, and what the scheduler and the runner raise.
    """
    started = time.perf_counter_ns()
    model.text.embedding.check(model.asked)
    async with await services.scheduler.lease(load_request(model, num_ctx), keep_alive=keep_alive) as lease:
        load_ns = time.perf_counter_ns() - started
        own = model.text.embedding.max_tokens or lease.context_length
        window = min(num_ctx or own, own, lease.context_length)
        ids = await asyncio.to_thread(_encoded, model, texts, window, truncate)
        rows = await _computed(lease, model, ids)
    services.metrics.prompt_tokens.add(sum(map(len, ids)), str(model.stored.name))
    if dimensions:
        if dimensions > rows.shape[1]:
            raise InvalidRequest(f"dimensions is {dimensions}, but the vectors of {model.asked} have {rows.shape[1]}")
        rows = rows[:, :dimensions]
    return Vectors(
        _normalised(rows) if normalise else rows, sum(map(len, ids)), time.perf_counter_ns() - started, load_ns
    )


def _encoded(model: OpenModel, texts: Sequence[str], window: int, truncate: bool) -> list[list[int]]:
    """Token ids of every text; PromptTooLong and InvalidRequest as `embed` says."""
    found = []
    for index, text in enumerate(texts):
        ids, cut = model.text.tokenizer.encode_whole(text, window)
        if cut and not truncate:
            raise PromptTooLong(
                f"the input length exceeds the context length: text {index} has more than {window} tokens; shorten it, "
                "or leave out truncate"
            )
        if len(ids) > window:
            raise PromptTooLong(
                f"input after truncation exceeds maximum context length: {window} tokens hold not even the special ones"
            )
        if not ids:
            raise InvalidRequest(f"text {index} is empty: it has no tokens")
        found.append(ids)
    return found


async def _computed(lease: Lease, model: OpenModel, ids: list[list[int]]) -> np.ndarray:
    request = Embed(id=uuid.uuid4().hex, texts=ids, pooling=model.text.embedding.pooling)
    with closing(lease.embed(request)) as messages:
        async for message in messages:
            if isinstance(message, Failed):
                raise error_of(message)
            if isinstance(message, Embedded):
                rows = np.frombuffer(message.vectors, "<f4").reshape(-1, message.width).astype(np.float32)
                if not np.isfinite(rows).all():
                    raise InvalidRequest("embedding contains NaN or Inf values")
                return rows
    raise RunnerCrashed(f"the runner of {model.asked} gave no vectors; send the request again")


def _normalised(rows: np.ndarray) -> np.ndarray:
    """Each row over its length; one of zeros stays."""
    lengths = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    normalised: np.ndarray = (rows / np.maximum(lengths, 1e-12)).astype(np.float32)
    return normalised
