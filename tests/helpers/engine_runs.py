"""Running an engine in tests: submits, collected replies, plain loops to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from arriero.model.contract import Batch, Model, Span
from arriero.runner.engine import Engine, Limits
from arriero.runner.messages import (
    Failed,
    Finished,
    PrefillProgress,
    PrefixUsed,
    SamplingOptions,
    Submit,
    TokenLogprob,
    Tokens,
)
from arriero.runner.prefix.disk import DiskTier
from arriero.runner.sampling import Sampler

GREEDY = SamplingOptions(temperature=0.0)


@dataclass
class Reply:
    """All that one row said."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    progress: list[tuple[int, int]] = field(default_factory=list)
    prefix: PrefixUsed | None = None
    end: Finished | Failed | None = None

    @property
    def reason(self) -> str | None:
        return self.end.reason if isinstance(self.end, Finished) else None


def make_engine(model: Any, ahead: bool | None = None, disk: DiskTier | None = None, **limits: int) -> Engine:
    chosen = {"context_length": model.facts.context_length, **limits}
    return Engine(model, Sampler(model.facts.vocab_size, chosen["context_length"]), Limits(**chosen), ahead, disk)


def submit(
    row: str, tokens: Sequence[int], count: int = 10, stop: Sequence[int] = (), sampling: SamplingOptions = GREEDY
) -> Submit:
    return Submit(id=row, tokens=list(tokens), max_tokens=count, stop_tokens=list(stop), sampling=sampling)


def collect(engine: Engine, replies: dict[str, Reply] | None = None) -> dict[str, Reply]:
    """The messages so far, by row; checks that nothing follows a row's end."""
    replies = {} if replies is None else replies
    for message in engine.drain():
        reply = replies.setdefault(message.id, Reply())
        assert reply.end is None, f"{message} after the end of its row"
        if isinstance(message, Tokens):
            reply.tokens += message.tokens
            reply.logprobs += message.logprobs or []
        elif isinstance(message, PrefillProgress):
            reply.progress.append((message.done, message.total))
        elif isinstance(message, PrefixUsed):
            reply.prefix = message
        elif isinstance(message, Finished | Failed):
            reply.end = message
    return replies


def run(engine: Engine, replies: dict[str, Reply] | None = None) -> dict[str, Reply]:
    """Step until nothing is left."""
    replies = {} if replies is None else replies
    while engine.busy:
        engine.step()
        collect(engine, replies)
    return collect(engine, replies)


def plain_loop(model: Model, prompt: Sequence[int], count: int, sampling: SamplingOptions = GREEDY) -> list[int]:
    """`count` tokens by the plainest loop: the whole prompt in one forward, then one token at a time."""
    sampler = Sampler(model.facts.vocab_size, model.facts.context_length)
    sampler.add("row", sampling, prompt)
    caches, tokens, position, out = model.new_caches(), list(prompt), 0, []
    for _ in range(count):
        hidden = model.forward(Batch(mx.array(tokens, mx.int32), [Span(0, len(tokens), position, caches)])).final
        position += len(tokens)
        tokens = sampler.sample(["row"], model.logits(hidden[-1:])).read_tokens()
        out += tokens
    return out
