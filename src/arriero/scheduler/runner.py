"""A runner as the server sees it: its process, its channel and the replies that are being read from it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq.asyncio

from arriero import errors
from arriero.errors import ArrieroError, InvalidRequest, LoadError, RunnerCrashed
from arriero.runner.messages import (
    Cancel,
    Embed,
    Embedded,
    Failed,
    Finished,
    FromRunner,
    LoadFailed,
    Loading,
    PrefillProgress,
    PrefixUsed,
    Ready,
    RunnerConfig,
    Shutdown,
    SpeculationUsed,
    Status,
    StatusRequest,
    Submit,
    Tokens,
    ToRunner,
    Vocabulary,
)
from arriero.scheduler.channel import ServerChannel
from arriero.scheduler.process import RunnerProcess

log = logging.getLogger(__name__)

RowMessage = Tokens | PrefixUsed | PrefillProgress | Finished | Embedded | Failed

_SETTLE_SECONDS = 0.05
"""After an exit: how long the channel must be quiet before we believe that nothing more comes."""

QUIET_SECONDS = 10.0
"""Silence of a runner with rows in flight after which it is asked for a sign of life."""

ANSWER_SECONDS = 60.0
"""How long that may take: the thread that answers never waits for a computation."""


@dataclass(frozen=True, slots=True)
class Drafting:
    """What drafting did for all replies of a runner so far."""

    kind: str
    """`lookup`, or the draft's architecture."""
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    reached_by_position: tuple[int, ...] = ()
    """How often the draft of each place in a round was looked at."""
    accepted_by_position: tuple[int, ...] = ()
    plain_steps: int = 0
    """Steps that could have had drafts and had none."""
    parked_ns: int = 0
    """Time of those steps."""

    def after(self, used: SpeculationUsed) -> Drafting:
        """The same with one more reply."""
        return self.plus(
            Drafting(
                used.kind,
                used.rounds,
                used.drafted,
                used.accepted,
                tuple(used.reached_by_position),
                tuple(used.accepted_by_position),
                used.plain_steps,
                used.parked_ns,
            )
        )

    def plus(self, other: Drafting) -> Drafting:
        """The same with what the same kind did elsewhere."""
        return Drafting(
            self.kind,
            self.rounds + other.rounds,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
            _summed(self.reached_by_position, other.reached_by_position),
            _summed(self.accepted_by_position, other.accepted_by_position),
            self.plain_steps + other.plain_steps,
            self.parked_ns + other.parked_ns,
        )


def _summed(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + b for a, b in itertools.zip_longest(first, second, fillvalue=0))


class Stream:
    """Messages of one row, from submit to its last one; the row counts until the runner has said that it ended."""

    def __init__(self, row_id: str, cache_bytes: int) -> None:
        self.id = row_id
        self.cache_bytes = cache_bytes
        """What the row may take, for the ledger."""
        self.queue: asyncio.Queue[RowMessage | RunnerCrashed] = asyncio.Queue()
        self.abandoned = False


class Runner:
    """One runner process. `ready` ends the load; `exited` any number of tasks may await."""

    def __init__(
        self,
        process: RunnerProcess,
        channel: ServerChannel,
        name: str,
        on_progress: Callable[[Loading], None],
        on_end: Callable[[], None],
    ) -> None:
        self.name = name
        self.process = process
        self.streams: dict[str, Stream] = {}
        self.drafting: Drafting | None = None
        self.knows_vocabulary = False
        self._channel = channel
        self._on_end = on_end
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._on_progress = on_progress
        self._statuses: dict[str, asyncio.Future[Status]] = {}
        self._questions = itertools.count()
        self._heard = 0
        self._heard_at = asyncio.get_running_loop().time()
        self._stopping = False
        self._hung = False
        self._guard = asyncio.create_task(self._watch(), name=f"signs of life of {name}")
        self._reader = asyncio.create_task(self._read(), name=f"messages of {name}")
        self._exited = asyncio.create_task(self._end(), name=f"end of {name}")

    @classmethod
    async def start(
        cls,
        context: zmq.asyncio.Context,
        command: Sequence[str],
        config: RunnerConfig,
        name: str,
        on_progress: Callable[[Loading], None],
        on_end: Callable[[], None],
    ) -> Runner:
        """Bind the channel and start the process; `on_end` is called whenever a row has ended."""
        channel = ServerChannel(context, config.endpoint)
        try:
            process = await RunnerProcess.start(command, config, name)
        except BaseException:
            channel.close()
            raise
        return cls(process, channel, name, on_progress, on_end)

    async def ready(self, timeout: float) -> Ready:
        """Wait until the model is loaded.

        Raises the error of the load, or LoadError when nothing was heard for `timeout` seconds.
        """
        now = asyncio.get_running_loop().time
        while (left := self._heard_at + timeout - now()) > 0:
            try:
                return await asyncio.wait_for(asyncio.shield(self._ready), left if math.isfinite(left) else None)
            except TimeoutError:
                continue
        raise LoadError(
            f"the runner of {self.name} made no progress for {timeout:g} s while loading"
            + (f" ({self.process.last_line})" if self.process.last_line else "")
            + "; raise ARRIERO_LOAD_TIMEOUT if it only needs longer"
        )

    def submit(self, request: Submit | Embed, cache_bytes: int) -> Stream:
        """Send a request; raises RunnerCrashed when the process has ended."""
        if self._exited.done():
            raise self._crash()
        if request.id in self.streams:
            raise InvalidRequest(f"a request with the id {request.id} is already running")
        # Sent first: a request that cannot be encoded must not leave a stream behind that never ends.
        self._channel.send(request)
        stream = self.streams[request.id] = Stream(request.id, cache_bytes)
        return stream

    def teach(self, vocabulary: Vocabulary) -> None:
        """Send the bytes of the tokens, once."""
        if not self.knows_vocabulary:
            self.send(vocabulary)
            self.knows_vocabulary = True

    def cancel(self, stream: Stream) -> None:
        """Nobody reads this stream any more: stop its row."""
        stream.abandoned = True
        if self.streams.get(stream.id) is stream and not self._exited.done():
            self._channel.send(Cancel(stream.id))

    def send(self, message: ToRunner) -> None:
        """Send a message that has no reply; a runner that has ended does not mind."""
        if not self._exited.done():
            self._channel.send(message)

    @property
    def cache_in_use(self) -> int:
        """Bytes that the caches of the rows in flight may grow to."""
        return sum(stream.cache_bytes for stream in self.streams.values())

    async def status(self) -> Status:
        """The runner's figures; raises RunnerCrashed when it has ended."""
        if self._exited.done():
            raise self._crash()
        request_id = f"status-{next(self._questions)}"
        future: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
        self._statuses[request_id] = future
        try:
            self._channel.send(StatusRequest(request_id))
            return await future
        finally:
            self._statuses.pop(request_id, None)

    async def exited(self) -> None:
        """Wait until the process is gone and all it said was heard."""
        await asyncio.shield(self._exited)

    async def stop(self) -> None:
        """Ask, interrupt, kill; returns when the process is gone. Rows in flight see RunnerCrashed."""
        self._stopping = True
        self.send(Shutdown())
        await self.process.stop()
        await self.exited()

    async def _read(self) -> None:
        async for message in self._channel.messages():
            self._heard += 1
            self._heard_at = asyncio.get_running_loop().time()
            self._take(message)

    def _take(self, message: FromRunner) -> None:
        if isinstance(message, RowMessage):
            stream = self.streams.get(message.id)
            if stream is None:
                log.debug("%s answered the unknown row %s", self.name, message.id)
                return
            if isinstance(message, Finished) and message.speculation is not None:
                self.drafting = (self.drafting or Drafting(message.speculation.kind)).after(message.speculation)
            if isinstance(message, Finished | Embedded | Failed):
                del self.streams[message.id]
                self._on_end()
            if not stream.abandoned:
                stream.queue.put_nowait(message)
        elif isinstance(message, Loading):
            self._on_progress(message)
        elif isinstance(message, Status):
            future = self._statuses.get(message.id)
            if future is not None and not future.done():
                future.set_result(message)
        elif self._ready.done():
            log.error("%s ended its load twice", self.name)
        elif isinstance(message, LoadFailed):
            # The runner knows files only; whoever reads the message knows the model by its name.
            self._fail_load(error_of(LoadFailed(message.error, f"{self.name}: {message.message}")))
        else:
            self._ready.set_result(message)

    async def _watch(self) -> None:
        """Kill a process that says nothing and answers nothing: its rows would wait for ever."""
        now = asyncio.get_running_loop().time
        try:
            while True:
                await asyncio.sleep(QUIET_SECONDS)
                if self.streams and now() - self._heard_at >= QUIET_SECONDS:
                    await asyncio.wait_for(self.status(), ANSWER_SECONDS)
        except TimeoutError:
            self._hung = True
            self.process.kill()
        except RunnerCrashed:
            return

    async def _end(self) -> None:
        """Wait for the exit, hear the rest, then tell everybody who still waits."""
        await self.process.wait()
        heard = -1
        while heard != self._heard:
            heard = self._heard
            await asyncio.sleep(_SETTLE_SECONDS)
        self._guard.cancel()
        self._reader.cancel()
        self._channel.close()
        crash = self._crash()
        if not self._stopping and (self._ready.done() and self._ready.exception() is None):
            log.error("%s", crash)
        if not self._ready.done():
            self._fail_load(LoadError(f"the runner of {self.name} ended while loading: {self.process.ending}"))
        for future in self._statuses.values():
            if not future.done():
                future.set_exception(crash)
        for stream in list(self.streams.values()):
            del self.streams[stream.id]
            self._on_end()
            stream.queue.put_nowait(crash)

    def _fail_load(self, error: ArrieroError) -> None:
        self._ready.set_exception(error)
        self._ready.exception()  # marks it as seen: a load may be abandoned before anybody asks

    def _crash(self) -> RunnerCrashed:
        if self._stopping:
            return RunnerCrashed(f"the runner of {self.name} was stopped")
        if self._hung:
            return RunnerCrashed(
                f"the runner of {self.name} gave no sign of life for {ANSWER_SECONDS:g} s; it was killed"
            )
        return RunnerCrashed(f"the runner of {self.name} ended unexpectedly: {self.process.ending}")


def error_of(message: Failed | LoadFailed) -> ArrieroError:
    """The exception that a runner's failure message stands for."""
    kind = getattr(errors, message.error, None)
    if isinstance(kind, type) and issubclass(kind, ArrieroError):
        return kind(message.message)
    return ArrieroError(message.message)
