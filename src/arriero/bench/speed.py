"""Speed of a model as a client sees it: prompt and decode tokens per second, through the whole product."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

_WORDS = (
    "salt wool rope snow river stone market winter bridge valley animal letter morning window copper garden "
    "paper engine colour number distance weather shoulder answer silver harvest station music kitchen mountain"
).split()


class StreamingClient(Protocol):
    """What is needed of a client: a request whose reply is a stream of objects."""

    def stream(self, method: str, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]: ...


@dataclass(frozen=True, slots=True)
class Sample:
    """One reply: tokens, seconds of the runner's own clock, and the first token as the client saw it."""

    prompt_tokens: int
    prompt_seconds: float
    tokens: int
    decode_seconds: float
    first_token_seconds: float
    total_seconds: float


@dataclass(frozen=True, slots=True)
class Speed:
    """Medians over the runs of one setting."""

    prompt_tokens: int
    parallel: int
    prefill: float
    """Prompt tokens per second of one request."""
    decode: float
    """New tokens per second of one request."""
    total: float
    """New tokens per second of all requests together."""
    first_token: float
    """Seconds from the request to its first token."""
    spread: float
    """(max − min) / median of `decode`."""
    streamed: float
    """New tokens per second of one request by the client's clock, from the first that it sees to the last."""


def prompt(words: int, seed: int) -> str:
    """Text that no cache has seen: random words."""
    draw = random.Random(seed)
    return f"{seed} " + " ".join(draw.choice(_WORDS) for _ in range(words))


def measure(client: StreamingClient, model: str, *, words: int, tokens: int, parallel: int, runs: int) -> Speed:
    """Run `parallel` requests at once, `runs` times after one warm-up.

    Raises ArrieroError for whatever the server answers; RuntimeError when a reply has no timings.
    """
    seeds = iter(range(random.randrange(10**6), 10**9))
    _sample(client, model, prompt(8, next(seeds)), 4)
    samples: list[Sample] = []
    totals: list[float] = []
    with ThreadPoolExecutor(parallel) as pool:
        for _ in range(runs):
            texts = [prompt(words, next(seeds)) for _ in range(parallel)]
            start = time.perf_counter()
            group = list(pool.map(lambda text: _sample(client, model, text, tokens), texts))
            elapsed = time.perf_counter() - start
            samples += group
            totals.append(sum(sample.tokens for sample in group) / elapsed)
    decode = [s.tokens / s.decode_seconds for s in samples if s.decode_seconds]
    median = statistics.median(decode) if decode else 0.0
    streams = [(s.tokens - 1) / (s.total_seconds - s.first_token_seconds) for s in samples if s.tokens > 1]
    return Speed(
        prompt_tokens=round(statistics.median(s.prompt_tokens for s in samples)),
        parallel=parallel,
        prefill=statistics.median(s.prompt_tokens / s.prompt_seconds for s in samples if s.prompt_seconds),
        decode=median,
        total=statistics.median(totals),
        first_token=statistics.median(s.first_token_seconds for s in samples),
        spread=(max(decode) - min(decode)) / median if median else 0.0,
        streamed=statistics.median(streams) if streams else 0.0,
    )


def _sample(client: StreamingClient, model: str, text: str, tokens: int) -> Sample:
    # A stop token would end the reply early, so the speed is measured without one: greedy, raw, a fixed budget.
    body = {"model": model, "prompt": text, "raw": True, "options": {"num_predict": tokens, "temperature": 0}}
    start = time.perf_counter()
    first = 0.0
    for chunk in client.stream("POST", "/api/generate", body):
        first = first or time.perf_counter() - start
        if chunk.get("done"):
            if "prompt_eval_count" not in chunk:
                raise RuntimeError("the server's final chunk has no timings, so nothing can be measured")
            return Sample(
                prompt_tokens=chunk["prompt_eval_count"],
                prompt_seconds=chunk.get("prompt_eval_duration", 0) / 1e9,
                tokens=chunk.get("eval_count", 0),
                decode_seconds=chunk.get("eval_duration", 0) / 1e9,
                first_token_seconds=first,
                total_seconds=time.perf_counter() - start,
            )
    raise RuntimeError("the reply ended without a final chunk")
