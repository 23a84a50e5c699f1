"""Models in and out of memory: room for the next one, its process, its figures, its end.

Refuses to know requests: it learns only whether a model is idle.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import zmq.asyncio

from arriero.errors import ArrieroError, LoadError
from arriero.runner.messages import Limit, Ready, RunnerConfig
from arriero.scheduler.channel import SocketDirectory
from arriero.scheduler.context import choose_context, row_bytes
from arriero.scheduler.entry import Entry, State
from arriero.scheduler.lease import LoadRequest
from arriero.scheduler.ledger import Account, Ledger, readable
from arriero.scheduler.runner import Drafting, Runner
from arriero.settings import Settings

log = logging.getLogger(__name__)

DEFAULT_MAX_LOADED = 3


class Loader:
    """All entries and what they are promised. Works in one running loop; `close` leaves nothing."""

    def __init__(
        self,
        settings: Settings,
        command: Sequence[str] | None,
        ledger: Ledger,
        scratch_bytes: int,
        on_ready: Callable[[Entry], None],
    ) -> None:
        """`command` starts a runner (None = ours); `on_ready` is called with each entry that has loaded."""
        self.entries: dict[str, Entry] = {}
        """By key: the one that a new request for the key gets."""
        self.leaving: set[Entry] = set()
        """Given up but not gone: draining, or being stopped."""
        self.ledger = ledger
        self.drafted: dict[tuple[str, str], Drafting] = {}
        """What drafting did in runners that have ended, by model and kind of draft."""
        self._settings = settings
        self._command = list(command or (sys.executable, "-m", "arriero.runner"))
        self._scratch = scratch_bytes
        self._on_ready = on_ready
        self._line: list[Entry] = []
        """Loads that wait for room, in order."""
        self._facts: dict[str, Ready] = {}
        """What earlier loads told, so that the next load of the key asks for the right amount at once."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._sockets = SocketDirectory()
        self._context: zmq.asyncio.Context | None = None

    def begin(self, request: LoadRequest, session: float) -> Entry:
        """Queue a load; raises OutOfMemory when the model could not even be held alone."""
        account = Account(request.name, request.weight_bytes, self._scratch)
        known = self._facts.get(request.key)
        if known is not None:
            account.weights, account.scratch = known.weight_bytes, self._scratch + known.round_bytes
            account.row = row_bytes(choose_context(request.context_length, known, 0), known)
        self.ledger.check_alone(account)
        entry = Entry(request, account, session)
        self.entries[request.key] = entry
        entry.load = self._spawn(self._load(entry))
        entry.load.add_done_callback(lambda _: self._end_load(entry))
        return entry

    def end(self, entry: Entry) -> asyncio.Future[None]:
        """Begin to stop a loaded model, once; the future is done when its process is gone, and may be cancelled."""
        if entry.ending is None:
            entry.state = State.STOPPING
            entry.stop_timer()
            self._forget(entry)
            self.leaving.add(entry)
            entry.ending = self._spawn(self._stop(entry))
        return asyncio.shield(entry.ending)

    def give_up(self, entry: Entry) -> None:
        """Begin to end a load that nobody wants any more; a request that comes from now on begins another."""
        if entry.load is not None and not entry.load.done():
            self._forget(entry)
            entry.load.cancel()

    async def abandon(self, entry: Entry) -> None:
        """End a load; returns when nothing of it is left."""
        self.give_up(entry)
        if entry.load is not None:
            await asyncio.wait([entry.load])

    def idle(self) -> list[Entry]:
        """Models whose memory can be had: those on their way out, then the idle ones, shortest session first."""
        going = [entry for entry in self.leaving if entry.ending is not None]
        ready = [entry for entry in self.entries.values() if entry.state is State.READY and entry.idle]
        return going + sorted(ready, key=lambda entry: (entry.session, entry.request.name))

    def share(self, news: Entry | None = None) -> None:
        """Divide the cache memory and tell the runners whose share changed (and `news` in any case)."""
        changed = {id(account) for account in self.ledger.divide()}
        for entry in [*self.entries.values(), *self.leaving]:
            if (
                entry.state is State.READY
                and entry.runner is not None
                and (id(entry.account) in changed or entry is news)
            ):
                entry.runner.send(Limit(entry.context, entry.account.granted))

    def notify(self) -> None:
        """Wake every load that waits for room."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def close(self) -> None:
        """End every load and every runner, and remove the sockets."""
        entries = [*self.entries.values(), *self.leaving]
        await asyncio.gather(*(self.end(e) if e.state is State.READY else self.abandon(e) for e in entries))
        while self._tasks:
            await asyncio.wait(self._tasks)
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None
        self._sockets.close()

    async def _load(self, entry: Entry) -> None:
        """The life of a load: room, process, figures; whatever ends it, waiters hear of it and nothing is left."""
        failure: ArrieroError = _unloaded(entry)
        try:
            while True:
                await self._room(entry)
                ready = await self._start(entry)
                if await self._settle(entry, ready):
                    break
                log.info("%s does not fit beside what is loaded and waits for room", entry.request.name)
                await self._drop_runner(entry)
                if entry.idle:
                    raise LoadError(f"{entry.request.name} does not fit beside what is loaded, and nobody waits for it")
            entry.finish_load()
            self.share(entry)
            self._spawn(self._watch(entry))
            self._on_ready(entry)
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
                try:
                    await self._drop_runner(entry)
                finally:
                    entry.fail_load(failure)
            self.notify()

    def _end_load(self, entry: Entry) -> None:
        """End a load that was cancelled before its first step, which has no `finally` to do it."""
        if not entry.loaded.done():
            self._forget(entry)
            entry.fail_load(_unloaded(entry))
            self.notify()

    async def _room(self, entry: Entry) -> None:
        """Wait in line until the entry's account fits, making room by unloading idle models."""
        entry.state = State.QUEUED
        self._line.append(entry)
        try:
            while True:
                self.ledger.check_alone(entry.account)
                if self._line[0] is entry:
                    if self._has_room(entry):
                        self.ledger.open(entry.account)
                        self.share()
                        return
                    self._evict()
                await self._changed.wait()
        finally:
            self._line.remove(entry)
            self.notify()

    def _has_room(self, entry: Entry) -> bool:
        others = {*self.entries.values(), *self.leaving} - {entry}
        most = self._settings.max_loaded_models or DEFAULT_MAX_LOADED
        return sum(other.state is not State.QUEUED for other in others) < most and self.ledger.fits(entry.account)

    def _evict(self) -> None:
        """Send one model away: the idle one with the shortest session, else the first of all after its requests."""
        if any(entry.state is State.STOPPING for entry in self.leaving):
            return
        ready = [entry for entry in self.entries.values() if entry.state is State.READY]
        ready.sort(key=lambda entry: (not entry.idle, entry.session, entry.request.name))
        if not ready or (self.leaving and not ready[0].idle):
            return
        victim = ready[0]
        log.info("%s makes room for another model", victim.request.name)
        if victim.idle:
            self.end(victim)
        else:
            self._forget(victim)
            self.leaving.add(victim)

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
            prefix_bytes=self._settings.prefix_cache,
            prefix_folder=str(self._settings.cache_dir or ""),
            prefix_folder_bytes=self._settings.cache_limit,
            dtype=self._settings.dtype,
            prefill=self._settings.prefill,
            speculation=self._settings.speculation,
            draft_tokens=self._settings.draft_tokens,
            log_level="DEBUG" if self._settings.debug else "INFO",
            parent_pid=os.getpid(),
        )
        log.info("loading %s", entry.request.name)
        name = entry.request.name
        runner = await Runner.start(self._context, self._command, config, name, entry.report, self.notify)
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
        account.scratch = self._scratch + ready.round_bytes
        free = self.ledger.free_beside(account) - account.weights - account.scratch
        entry.ready = ready
        entry.context = choose_context(entry.request.context_length, ready, free)
        account.row = row_bytes(entry.context, ready)
        self.ledger.check_alone(account)
        while not self.ledger.fits(account):
            idle = self.idle()
            if not idle:
                return False
            await self.end(idle[0])
        return True

    async def _watch(self, entry: Entry) -> None:
        """A runner that ends by itself takes its model out of the list, so that the next request starts a new one."""
        assert entry.runner is not None
        await entry.runner.exited()
        if entry.state is State.READY:
            await self.end(entry)

    async def _stop(self, entry: Entry) -> None:
        try:
            await self._drop_runner(entry)
        finally:
            self.leaving.discard(entry)
            self.share()
            self.notify()

    async def _drop_runner(self, entry: Entry) -> None:
        """Stop the entry's process, if it has one, and give its memory back; goes on when the caller is cancelled."""
        await asyncio.shield(self._spawn(self._stop_runner(entry)))

    async def _stop_runner(self, entry: Entry) -> None:
        try:
            if entry.runner is not None:
                await entry.runner.stop()
        finally:
            if entry.runner is not None and entry.runner.drafting is not None:
                add_drafting(self.drafted, entry.request.name, entry.runner.drafting)
            entry.runner = None
            self.ledger.close(entry.account)

    def _forget(self, entry: Entry) -> None:
        if self.entries.get(entry.request.key) is entry:
            del self.entries[entry.request.key]

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run in the background; `close` waits for it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def add_drafting(totals: dict[tuple[str, str], Drafting], name: str, more: Drafting) -> None:
    """Add what drafting did for a model to totals by model and kind."""
    key = name, more.kind
    totals[key] = totals[key].plus(more) if key in totals else more


def _unloaded(entry: Entry) -> LoadError:
    return LoadError(f"{entry.request.name} was unloaded while it was loading")
