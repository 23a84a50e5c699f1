"""What a request holds while it uses a loaded model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from arriero.errors import RunnerCrashed
from arriero.runner.messages import Embed, Embedded, Failed, Finished, Ready, Submit, Vocabulary
from arriero.scheduler.runner import Drafting, RowMessage, Runner, Stream
from arriero.source import ModelSource


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """The model that a request needs."""

    key: str
    """Digest of the manifest: equal keys share a runner."""
    name: str
    """For listings and messages."""
    source: ModelSource
    weight_bytes: int
    """Bytes of the weights' files; replaced by the true figure once loaded."""
    context_length: int = 0
    """Tokens that one row must be able to hold, cut to the model's own limit; 0 = decided from memory."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """One line of a listing."""

    key: str
    name: str
    state: Literal["queued", "loading", "ready"]
    weight_bytes: int
    reserved_bytes: int
    """Weights, scratch and the caches that it may use."""
    context_length: int
    """0 until it is ready."""
    device: str
    """`cpu (…)` or `gpu (…)`; '' until it is ready."""
    expires_at: float
    """Unix time at which it leaves when nobody asks again; infinity = never."""
    loaded_fraction: float
    """0 to 1."""
    requests: int
    """Leases held now."""
    drafting: Drafting | None = None
    """None before the first reply, and where nothing drafts."""


class Generation:
    """The messages of one row. Ends after `Finished` or `Failed`; `close` before that cancels the row."""

    def __init__(self, runner: Runner, stream: Stream) -> None:
        self._runner = runner
        self._stream = stream
        self._ended = False

    def __aiter__(self) -> AsyncIterator[RowMessage]:
        return self

    async def __anext__(self) -> RowMessage:
        """The next message; raises RunnerCrashed when the runner ended before the row did."""
        if self._ended:
            raise StopAsyncIteration
        message = await self._stream.queue.get()
        if isinstance(message, RunnerCrashed):
            self._ended = True
            raise message
        if isinstance(message, Finished | Embedded | Failed):
            self._ended = True
        return message

    def close(self) -> None:
        """Stop reading; a row that still runs is cancelled."""
        if not self._ended:
            self._ended = True
            self._runner.cancel(self._stream)


class Lease:
    """The right to use a loaded model until it is released; an async context manager."""

    def __init__(
        self,
        runner: Runner,
        ready: Ready,
        context_length: int,
        load_ns: int,
        row_bytes: Callable[[int], int],
        on_release: Callable[[], None],
    ) -> None:
        self.ready = ready
        """Facts of the loaded model; `context_length` is what a row may hold here."""
        self.context_length = context_length
        self.load_ns = load_ns
        """Nanoseconds that this request waited for the model; 0 when it was loaded."""
        self._runner = runner
        self._row_bytes = row_bytes
        self._on_release = on_release
        self._generations: list[Generation] = []
        self._released = False

    async def __aenter__(self) -> Lease:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    async def generate(self, request: Submit) -> AsyncIterator[RowMessage]:
        """Run a request: prefill progress and tokens, then `Finished` or `Failed`.

        Closing the iterator, or releasing the lease, cancels what still runs. Raises RunnerCrashed when the runner
        ends.
        """
        generation = self.submit(request)
        try:
            async for message in generation:
                yield message
        finally:
            generation.close()

    def submit(self, request: Submit) -> Generation:
        """Like `generate`, but the row is on its way to the runner when this returns."""
        room = self.context_length - len(request.tokens)
        new = min(request.max_tokens, room) if request.max_tokens > 0 else room
        stream = self._runner.submit(request, self._row_bytes(max(0, len(request.tokens) + new)))
        generation = Generation(self._runner, stream)
        self._generations.append(generation)
        return generation

    def embed(self, request: Embed) -> Generation:
        """Send texts to be turned into vectors; the generation gives one message, `Embedded` or `Failed`."""
        longest = max(map(len, request.texts), default=0)
        generation = Generation(self._runner, self._runner.submit(request, self._row_bytes(longest)))
        self._generations.append(generation)
        return generation

    @property
    def knows_vocabulary(self) -> bool:
        """Whether the runner can follow grammars."""
        return self._runner.knows_vocabulary

    def teach(self, vocabulary: Vocabulary) -> None:
        """Tell the runner the bytes of its tokens, before the first request with a grammar."""
        self._runner.teach(vocabulary)

    def release(self) -> None:
        """Give the model back, once; rows of this lease that still run are cancelled."""
        if self._released:
            return
        self._released = True
        try:
            for generation in self._generations:
                generation.close()
        finally:
            self._on_release()
