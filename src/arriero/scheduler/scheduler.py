"""Which models are loaded: leases, keep-alive, room for the next one. Refuses to know text and HTTP."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import zmq.asyncio

from arriero.errors import ArrieroError, LoadError, OutOfMemory, ServerBusy
from arriero.runner.messages import Limit, Loading, Ready, RunnerConfig
from arriero.scheduler.channel import SocketDirectory
from arriero.scheduler.context import choose_context, row_bytes
from arriero.scheduler.entry import Entry, State
from arriero.scheduler.lease import Lease, LoadedModel, LoadRequest
from arriero.scheduler.ledger import SCRATCH_BYTES, Account, Ledger, readable
from arriero.scheduler.memory import machine_memory
from arriero.scheduler.runner import Runner
from arriero.settings import Settings

log = logging.getLogger(__name__)

DEFAULT_MAX_LOADED = 3

BUSY = "server busy, please try again.  maximum pending requests exceeded"
"""Ollama's words, two blanks included: clients look for them."""


class Scheduler:
    """Leases of loaded models. Made and used inside one running loop; `close` ends every runner."""

    def __init__(
        self,
        settings: Settings,
        *,
        runner_command: Sequence[str] | None = None,
        memory: Callable[[], int] | None = None,
        scratch_bytes: int = SCRATCH_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`runner_command` starts a runner (`-` is appended); `memory` gives the bytes that all may use, each time."""
        self._settings = settings
        self._command = list(runner_command or (sys.executable, "-m", "arriero.runner"))
        fixed = settings.memory_limit
        self._ledger = Ledger((lambda: fixed) if fixed else memory or machine_memory)
        self._scratch = scratch_bytes
        self._clock = clock
        self._entries: dict[str, Entry] = {}
        """By key: the one that a new request for the key gets."""
        self._leaving: set[Entry] = set()
        """Given up but not gone: draining, or being stopped."""
        self._line: list[Entry] = []
        """Loads that wait for room, in order."""
        self._facts: dict[str, Ready] = {}
        """What earlier loads told, so that the next load of the key asks for the right amount at once."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._sockets = SocketDirectory()
        self._context: zmq.asyncio.Context | None = None
        self._closed = False

    # --- requests

    async def lease(self, request: LoadRequest, keep_alive: float | None = None) -> Lease:
        """The loaded model, loading it first where needed; use the result with `async with`.

        `keep_alive` (seconds, infinity = for ever) replaces the model's from now on. Raises ServerBusy when too many
        wait, OutOfMemory with both figures, LoadError and its kin. A caller that is cancelled while it waits leaves the
        queue; a load that has begun goes on.
        """
        started = time.monotonic_ns()
        waited = False
        while True:
            if self._closed:
                raise LoadError("the server is shutting down")
            entry = self._entries.get(request.key)
            if self.waiting >= self._settings.max_queue and (
                entry is None or entry.state is not State.READY or entry.free_rows <= 0
            ):
                raise ServerBusy(BUSY)
            if entry is None:
                entry = self._begin(request, keep_alive)
            if entry.state is not State.READY:
                waited = True
                await self._wait(entry)
            # It may have been told to leave already; those who waited for it come first.
            if entry.state is State.READY and not entry.has_exited:
                break
            if entry.ending is not None or entry.has_exited:
                await self._end(entry)
        self._fit_context(entry, request)
        entry.users += 1
        entry.stop_timer()
        if keep_alive is not None:
            entry.session = keep_alive
        return self._lease(entry, request, time.monotonic_ns() - started if waited else 0)

    @property
    def waiting(self) -> int:
        """Requests that wait: for a load, or in a runner for one of its rows."""
        entries = [*self._entries.values(), *self._leaving]
        return sum(entry.waiters + entry.queued_rows for entry in entries)

    @property
    def reserved_bytes(self) -> int:
        """Bytes promised to runners now."""
        return self._ledger.reserved

    async def unload(self, key: str) -> bool:
        """Let a model go: now when it is idle or loading, else after its requests; False when it isn't there.

        Returns once its process is gone, except when requests still use it.
        """
        entry = self._entries.get(key)
        if entry is None:
            return any(entry.request.key == key for entry in self._leaving)
        entry.session = 0.0
        if entry.state is not State.READY:
            await self._abandon(entry)
        elif entry.idle:
            await self._end(entry)
        return True

    def loaded(self) -> list[LoadedModel]:
        """Every model that is queued, loading or loaded, latest expiry first."""
        entries = [*self._entries.values(), *(entry for entry in self._leaving if entry.state is State.READY)]
        return sorted((entry.describe(self._clock()) for entry in entries), key=lambda model: -model.expires_at)

    async def progress(self, key: str) -> AsyncIterator[Loading]:
        """Progress of a load from now on; ends when it is loaded, failed, or there is none."""
        entry = self._entries.get(key)
        if entry is None or entry.state is State.READY:
            return
        with entry.listening() as queue:
            while (event := await queue.get()) is not None:
                yield event

    async def close(self) -> None:
        """Stop every runner and remove the sockets; leases still held see RunnerCrashed."""
        self._closed = True
        entries = [*self._entries.values(), *self._leaving]
        await asyncio.gather(*(self._abandon(e) if e.state is not State.READY else self._end(e) for e in entries))
        while self._tasks:
            await asyncio.wait(self._tasks)
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None
        self._sockets.close()

    # --- leases

    async def _wait(self, entry: Entry) -> None:
        """Wait for a load as one of its waiters."""
        entry.waiters += 1
        try:
            await asyncio.shield(entry.loaded)
        except asyncio.CancelledError:
            if entry.waiters == 1 and entry.state is State.QUEUED and entry.load is not None:
                entry.load.cancel()  # nobody wants it and nothing has been spent on it
            raise
        finally:
            entry.waiters -= 1
            # A model that nobody takes up must still begin its idle time, but a waiter takes it up only after this.
            asyncio.get_running_loop().call_soon(self._rest, entry)

    def _lease(self, entry: Entry, request: LoadRequest, load_ns: int) -> Lease:
        assert entry.runner is not None
        assert entry.ready is not None
        ready = entry.ready
        context = min(request.context_length or entry.context, entry.context)
        return Lease(
            entry.runner, ready, context, load_ns, lambda tokens: row_bytes(tokens, ready), lambda: self._release(entry)
        )

    def _release(self, entry: Entry) -> None:
        entry.users -= 1
        self._rest(entry)
        self._notify()

    def _rest(self, entry: Entry) -> None:
        """An idle model's time runs; one that nobody may keep leaves."""
        if entry.state is not State.READY or not entry.idle:
            return
        if entry in self._leaving or entry.session <= 0:
            self._end(entry)
        else:
            entry.start_timer(self._clock(), lambda: self._expire(entry))

    def _expire(self, entry: Entry) -> None:
        if entry.idle and entry.state is State.READY:
            log.info("%s was idle for %g s and is unloaded", entry.request.name, entry.session)
            self._end(entry)

    def _fit_context(self, entry: Entry, request: LoadRequest) -> None:
        """Give the runner a larger context when a request needs one; OutOfMemory when there is no room for it."""
        ready = entry.ready
        assert ready is not None
        wanted = min(request.context_length, ready.context_length)
        if wanted <= entry.context:
            return
        free = self._ledger.free_beside(entry.account)
        needed = entry.account.weights + entry.account.scratch + row_bytes(wanted, ready)
        if needed > free:
            raise OutOfMemory(
                f"model {request.name} requires {readable(needed)} with a context of {wanted} tokens but only"
                f" {readable(free)} are available; lower num_ctx"
            )
        entry.context, entry.account.row = wanted, row_bytes(wanted, ready)
        self._share(entry)

    # --- loads

    def _begin(self, request: LoadRequest, keep_alive: float | None) -> Entry:
        account = Account(request.name, request.weight_bytes, self._scratch)
        known = self._facts.get(request.key)
        if known is not None:
            account.weights = known.weight_bytes
            account.row = row_bytes(choose_context(request.context_length, known, 0), known)
        self._ledger.check_alone(account)
        session = self._settings.keep_alive if keep_alive is None else keep_alive
        entry = Entry(request, account, session)
        self._entries[request.key] = entry
        entry.load = self._spawn(self._load(entry))
        return entry

    async def _load(self, entry: Entry) -> None:
        """The life of a load: room, process, figures; whatever ends it, waiters hear of it and nothing is left."""
        failure: ArrieroError = LoadError(f"{entry.request.name} was unloaded while it was loading")
        try:
            while True:
                await self._room(entry)
                ready = await self._start(entry)
                if await self._settle(entry, ready):
                    break
                log.info("%s does not fit beside what is loaded and waits for room", entry.request.name)
                await self._drop_runner(entry)
            entry.finish_load()
            self._share(entry)
            self._spawn(self._watch(entry))
            self._rest(entry)
        except asyncio.CancelledError:
            raise
        except ArrieroError as error:
            failure = error
        except Exception as error:
            log.exception("the load of %s failed", entry.request.name)
            failure = LoadError(f"{entry.request.name} cannot be loaded: {type(error).__name__}: {error}")
        finally:
            if entry.state is not State.READY:
                self._forget(entry)
                await self._drop_runner(entry)
                entry.fail_load(failure)
            self._notify()

    async def _room(self, entry: Entry) -> None:
        """Wait in line until the entry's account fits, making room by unloading idle models."""
        entry.state = State.QUEUED
        self._line.append(entry)
        try:
            while True:
                self._ledger.check_alone(entry.account)
                if self._line[0] is entry:
                    if self._has_room(entry):
                        self._ledger.open(entry.account)
                        self._share()
                        return
                    self._evict()
                await self._changed.wait()
        finally:
            self._line.remove(entry)
            self._notify()

    def _has_room(self, entry: Entry) -> bool:
        others = {*self._entries.values(), *self._leaving} - {entry}
        most = self._settings.max_loaded_models or DEFAULT_MAX_LOADED
        return sum(other.state is not State.QUEUED for other in others) < most and self._ledger.fits(entry.account)

    def _evict(self) -> None:
        """Send one model away: the idle one with the shortest session, else the first of all after its requests."""
        if any(entry.state is State.STOPPING for entry in self._leaving):
            return
        ready = [entry for entry in self._entries.values() if entry.state is State.READY]
        ready.sort(key=lambda entry: (not entry.idle, entry.session, entry.request.name))
        if not ready or (self._leaving and not ready[0].idle):
            return
        victim = ready[0]
        log.info("%s makes room for another model", victim.request.name)
        if victim.idle:
            self._end(victim)
        else:
            self._forget(victim)
            self._leaving.add(victim)

    async def _start(self, entry: Entry) -> Ready:
        """Start the process and wait for its model."""
        entry.state = State.LOADING
        if self._context is None:
            self._context = zmq.asyncio.Context()
        config = RunnerConfig(
            source=entry.request.source,
            endpoint=self._sockets.endpoint(),
            max_rows=self._settings.num_parallel,
            prefill_chunk=self._settings.prefill_chunk,
            dtype=self._settings.dtype,
            log_level="DEBUG" if self._settings.debug else "INFO",
            parent_pid=os.getpid(),
        )
        log.info("loading %s", entry.request.name)
        name = entry.request.name
        runner = await Runner.start(self._context, self._command, config, name, entry.report, self._notify)
        entry.runner = runner
        entry.account.use = lambda: runner.cache_in_use
        ready = await runner.ready(self._settings.load_timeout)
        log.info("%s is loaded: %s in %.1f s", entry.request.name, readable(ready.weight_bytes), ready.load_seconds)
        return ready

    async def _settle(self, entry: Entry, ready: Ready) -> bool:
        """Replace the account's estimates by the model's figures; False when it must wait for room with them."""
        self._facts[entry.request.key] = ready
        account = entry.account
        account.weights, account.rows = ready.weight_bytes, ready.max_rows
        free = self._ledger.free_beside(account) - account.weights - account.scratch
        entry.ready = ready
        entry.context = choose_context(entry.request.context_length, ready, free)
        account.row = row_bytes(entry.context, ready)
        self._ledger.check_alone(account)
        while not self._ledger.fits(account):
            idle = [e for e in self._entries.values() if e.state is State.READY and e.idle]
            if not idle:
                return False
            await self._end(min(idle, key=lambda e: (e.session, e.request.name)))
        return True

    # --- ends

    async def _watch(self, entry: Entry) -> None:
        """A runner that ends by itself takes its model out of the list, so that the next request starts a new one."""
        assert entry.runner is not None
        await entry.runner.exited()
        if entry.state is State.READY:
            await self._end(entry)

    def _end(self, entry: Entry) -> asyncio.Future[None]:
        """Begin to stop a loaded model, once; the future is done when its process is gone, and may be cancelled."""
        if entry.ending is None:
            entry.state = State.STOPPING
            entry.stop_timer()
            self._forget(entry)
            self._leaving.add(entry)
            entry.ending = self._spawn(self._stop(entry))
        return asyncio.shield(entry.ending)

    async def _stop(self, entry: Entry) -> None:
        try:
            await self._drop_runner(entry)
        finally:
            self._leaving.discard(entry)
            self._share()
            self._notify()

    @staticmethod
    async def _abandon(entry: Entry) -> None:
        """End a load that nobody wants any more; returns when nothing of it is left."""
        if entry.load is not None and not entry.load.done():
            entry.load.cancel()
            await asyncio.wait([entry.load])

    async def _drop_runner(self, entry: Entry) -> None:
        """Stop the entry's process, if it has one, and give its memory back; goes on when the caller is cancelled."""
        await asyncio.shield(self._spawn(self._stop_runner(entry)))

    async def _stop_runner(self, entry: Entry) -> None:
        try:
            if entry.runner is not None:
                await entry.runner.stop()
        finally:
            entry.runner = None
            self._ledger.close(entry.account)

    def _forget(self, entry: Entry) -> None:
        if self._entries.get(entry.request.key) is entry:
            del self._entries[entry.request.key]

    def _share(self, news: Entry | None = None) -> None:
        """Divide the cache memory and tell the runners whose share changed (and `news` in any case)."""
        changed = {id(account) for account in self._ledger.divide()}
        for entry in [*self._entries.values(), *self._leaving]:
            if (
                entry.state is State.READY
                and entry.runner is not None
                and (id(entry.account) in changed or entry is news)
            ):
                entry.runner.send(Limit(entry.context, entry.account.granted))

    def _notify(self) -> None:
        """Wake every load that waits for room."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run in the background; `close` waits for it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
