"""The way of a generation through the server, the same for every API: prompt → lease → tokens → events.

An API makes a `Generation` and turns what `generate` yields into its own wire form. Refuses to know wire formats.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

from arriero.chat.grammar import Format, grammar_for
from arriero.chat.parsers.events import Parser
from arriero.errors import RunnerCrashed
from arriero.image import PlacedImage
from arriero.runner.messages import (
    Failed,
    Finished,
    Grammar,
    PrefixUsed,
    SpeculationUsed,
    Submit,
    Tokens,
    Trigger,
    Vocabulary,
)
from arriero.scheduler import Lease, LoadRequest, error_of
from arriero.server.metrics import ReplyMeter
from arriero.server.models import OpenModel
from arriero.server.parameters import Parameters
from arriero.server.prefix_log import log_prefix
from arriero.server.services import Services
from arriero.server.transcript import Delta, Transcript

log = logging.getLogger(__name__)


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt's tokens, and what was left out to make it fit."""

    tokens: list[int]
    boundaries: list[int] = []
    """Offsets in `tokens` where messages end."""
    images: list[PlacedImage] = []
    """Over placeholders in `tokens`."""
    dropped_messages: int = 0
    dropped_tokens: int = 0

    def __len__(self) -> int:
        return len(self.tokens)


class PromptMaker(Protocol):
    """Makes the prompt of one request; called in worker threads, never by two at once."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end the reply."""
        ...

    def whole(self) -> Prompt:
        """The prompt with nothing left out; raises TemplateError and the like."""
        ...

    def parser(self) -> Parser:
        """A parser for the reply."""
        ...

    def fitted(self, window: int, limit: int, num_predict: int) -> Prompt:
        """The prompt for a window of so many tokens; `limit` is the widest that could be had.

        Raises PromptTooLong when it doesn't fit and nothing may or can be left out.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What to generate, and how."""

    model: OpenModel
    prompt: PromptMaker
    parameters: Parameters
    keep_alive: float | None
    """Seconds that the model stays loaded afterwards; None = as before."""
    format: Format | None = None
    """What form the reply must have."""
    triggers: Sequence[Trigger] = ()
    """What holds in calls that the reply may make."""
    started_ns: int = field(default_factory=time.perf_counter_ns)


class Final(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a reply: why, and what it took. Times are nanoseconds."""

    reason: Literal["stop", "length"]
    looped: bool = False
    """Whether it was cut off because it went round in circles."""
    stopped_by: str | None = None
    """The stop string that ended the reply."""
    cached_tokens: int
    generated_tokens: int
    thinking_tokens: int = 0
    """Of those, what the thoughts took."""
    total_ns: int
    load_ns: int
    prefill_ns: int
    decode_ns: int
    speculation: SpeculationUsed | None = None
    """None where nothing could draft, and where a stop string cut the row off."""
    prompt: Prompt
    tokens: list[int]
    """The reply's tokens, without the one that ended it."""


Event = Delta | Final


async def generate(services: Services, generation: Generation) -> AsyncGenerator[Event, None]:
    """The reply's pieces as they come, then one `Final`; closing the generator cancels the row.

    Raises what the prompt maker raises (before anything is loaded, where it can), what the scheduler raises while the
    model loads, and what the runner reports afterwards.
    """
    await asyncio.to_thread(generation.prompt.whole)
    parameters = generation.parameters
    request = load_request(generation.model, parameters.num_ctx)
    meter = ReplyMeter(services.metrics, request.name, generation.started_ns)
    reason = "left"
    try:
        async with await services.scheduler.lease(request, keep_alive=generation.keep_alive) as lease:
            load_ns = time.perf_counter_ns() - generation.started_ns
            window = min(parameters.num_ctx or lease.context_length, lease.context_length)
            limit = max(window, generation.model.context_length)
            prompt = await asyncio.to_thread(generation.prompt.fitted, window, limit, parameters.num_predict)
            async with aclosing(_reply(lease, generation, prompt, window, load_ns, meter)) as events:
                async for event in events:
                    if isinstance(event, Final):
                        reason = event.reason
                    yield event
    except Exception:
        reason = "error"
        raise
    finally:
        meter.end(reason)


async def load(services: Services, model: OpenModel, num_ctx: int, keep_alive: float | None) -> None:
    """Load a model, or renew its keep-alive."""
    async with await services.scheduler.lease(load_request(model, num_ctx), keep_alive=keep_alive):
        return


def load_request(model: OpenModel, num_ctx: int) -> LoadRequest:
    """What the scheduler must know to load a model for a window of `num_ctx` tokens (0 = decided from memory)."""
    return LoadRequest(
        key=model.stored.digest,
        name=str(model.stored.name),
        source=model.source,
        weight_bytes=model.weight_bytes,
        context_length=num_ctx,
    )


async def _reply(
    lease: Lease, generation: Generation, prompt: Prompt, window: int, load_ns: int, meter: ReplyMeter
) -> AsyncGenerator[Event, None]:
    text, parser = generation.model.text, generation.prompt.parser()
    grammar = None
    if generation.format is not None or generation.triggers:
        grammar = grammar_for(generation.format, parser, text.tokenizer.tag, generation.triggers)
        if not lease.knows_vocabulary:
            tokens, special = await asyncio.to_thread(text.tokenizer.all_bytes)
            lease.teach(Vocabulary(tokens=tokens, special=special))
    transcript = Transcript(text.tokenizer, parser, generation.parameters.stop)
    submitted, first, restored = time.perf_counter_ns(), 0, 0
    finished: Finished | None = None
    looped = False
    with closing(lease.submit(_submit(generation, prompt, window, grammar))) as messages:
        async for message in messages:
            if isinstance(message, Tokens):
                first = first or time.perf_counter_ns()
                meter.tokens(len(message.tokens))
                for delta in join_deltas(_fed(transcript, message)):
                    yield delta
                looped = transcript.loops
                if looped:
                    log.warning("%s: the reply repeats the same tags; it is cut off", generation.model.asked)
                if transcript.stopped or looped:
                    break  # closing `messages` stops the row; what it would still say is not waited for
            elif isinstance(message, PrefixUsed):
                restored = message.restored
                log_prefix(generation.model, prompt.tokens, message)
            elif isinstance(message, Finished):
                finished = message
            elif isinstance(message, Failed):
                raise error_of(message)
    if finished is not None and finished.reason == "cancelled":
        raise RunnerCrashed("the reply was cut off because the model was unloaded; send the request again")
    for delta in join_deltas(transcript.finish()):
        yield delta
    now = time.perf_counter_ns()
    cached = finished.cached_tokens if finished else restored
    meter.prompt(len(prompt), cached)
    ended_by_limit = finished is not None and finished.reason == "length"
    yield Final(
        reason="length" if looped or (ended_by_limit and not transcript.stopped) else "stop",
        looped=looped,
        stopped_by=transcript.stopped_by,
        cached_tokens=cached,
        generated_tokens=len(transcript.tokens),
        thinking_tokens=transcript.thinking_tokens,
        total_ns=now - generation.started_ns,
        load_ns=load_ns,
        prefill_ns=finished.prefill_ns if finished else first - submitted,
        decode_ns=finished.decode_ns if finished else now - first,
        speculation=finished.speculation if finished else None,
        prompt=prompt,
        tokens=transcript.tokens,
    )


def _submit(generation: Generation, prompt: Prompt, window: int, grammar: Grammar | None) -> Submit:
    room = window - len(prompt)
    wanted = generation.parameters.num_predict
    return Submit(
        id=uuid.uuid4().hex,
        tokens=prompt.tokens,
        max_tokens=min(wanted, room) if wanted > 0 else room,
        stop_tokens=sorted(generation.prompt.stop_ids),
        sampling=generation.parameters.sampling,
        boundaries=prompt.boundaries,
        images=prompt.images,
        grammar=grammar,
    )


def _fed(transcript: Transcript, message: Tokens) -> list[Delta]:
    deltas: list[Delta] = []
    for index, token in enumerate(message.tokens):
        deltas += transcript.feed(token, message.logprobs[index] if message.logprobs else None)
    return deltas


def join_deltas(deltas: list[Delta]) -> list[Delta]:
    """What came at once with neighbours of one kind made one piece."""
    joined: list[Delta] = []
    for delta in deltas:
        if joined and joined[-1].kind == delta.kind:
            last = joined.pop()
            delta = Delta(
                content=last.content + delta.content,
                thinking=last.thinking + delta.thinking,
                tool_calls=last.tool_calls + delta.tool_calls,
                logprobs=last.logprobs + delta.logprobs,
            )
        joined.append(delta)
    return joined
