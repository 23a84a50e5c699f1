"""Which models are loaded: leases, keep-alive, room for the next one. Refuses to know text and HTTP."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence

from arriero.errors import LoadError, OutOfMemory, ServerBusy
from arriero.runner.messages import Loading, Status
from arriero.scheduler.context import choose_context, row_bytes
from arriero.scheduler.entry import Entry, State
from arriero.scheduler.lease import Lease, LoadedModel, LoadRequest
from arriero.scheduler.ledger import SCRATCH_BYTES, Ledger, readable
from arriero.scheduler.loader import Loader, add_drafting
from arriero.scheduler.memory import machine_memory
from arriero.scheduler.runner import Drafting
from arriero.settings import Settings

log = logging.getLogger(__name__)

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
        fixed = settings.memory_limit
        ledger = Ledger((lambda: fixed) if fixed else memory or machine_memory)
        self._loader = Loader(settings, runner_command, ledger, scratch_bytes, self._rest)
        self._entries = self._loader.entries
        self._clock = clock
        self._closed = False

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
                session = self._settings.keep_alive if keep_alive is None else keep_alive
                entry = self._loader.begin(request, session)
            if entry.state is not State.READY:
                waited = True
                await self._wait(entry)
            # It may have been told to leave already; those who waited for it come first.
            if entry.state is State.READY and not entry.has_exited:
                await self._take_up(entry, request)
                if entry.state is State.READY and not entry.has_exited:
                    break
                self._release(entry)
            if entry.ending is not None or entry.has_exited:
                await self._loader.end(entry)
        if keep_alive is not None:
            entry.session = keep_alive
        return self._lease(entry, request, time.monotonic_ns() - started if waited else 0)

    @property
    def waiting(self) -> int:
        """Requests that wait: for a load, or in a runner for one of its rows."""
        entries = [*self._entries.values(), *self._loader.leaving]
        return sum(entry.waiters + entry.queued_rows for entry in entries)

    @property
    def reserved_bytes(self) -> int:
        """Bytes promised to runners now."""
        return self._loader.ledger.reserved

    async def unload(self, key: str) -> bool:
        """Let a model go: now when it is idle or loading, else after its requests; False when it isn't there.

        Returns once its process is gone, except when requests still use it.
        """
        entry = self._entries.get(key)
        if entry is None:
            leaving = [entry for entry in self._loader.leaving if entry.request.key == key]
            for entry in leaving:
                if entry.ending is not None:
                    await self._loader.end(entry)
            return bool(leaving)
        entry.session = 0.0
        if entry.state is not State.READY:
            await self._loader.abandon(entry)
        elif entry.idle:
            await self._loader.end(entry)
        return True

    def loaded(self) -> list[LoadedModel]:
        """Every model that is queued, loading or loaded, latest expiry first."""
        entries = [*self._entries.values(), *(entry for entry in self._loader.leaving if entry.state is State.READY)]
        return sorted((entry.describe(self._clock()) for entry in entries), key=lambda model: -model.expires_at)

    def drafting(self) -> dict[tuple[str, str], Drafting]:
        """What drafting did since the start, by model and kind of draft."""
        totals = dict(self._loader.drafted)
        for entry in self._with_runners():
            if entry.runner is not None and entry.runner.drafting is not None:
                add_drafting(totals, entry.request.name, entry.runner.drafting)
        return totals

    async def statuses(self, seconds: float) -> list[tuple[str, Status]]:
        """The figures of every runner that is loaded and answers in time, with its model's name."""
        asked = {
            asyncio.create_task(entry.runner.status()): entry.request.name
            for entry in self._with_runners()
            if entry.state is State.READY and entry.runner is not None
        }
        if not asked:
            return []
        answered, silent = await asyncio.wait(asked, timeout=seconds)
        for task in silent:
            task.cancel()
        await asyncio.gather(*silent, return_exceptions=True)
        return [(asked[task], task.result()) for task in answered if task.exception() is None]

    def _with_runners(self) -> list[Entry]:
        return [entry for entry in {*self._entries.values(), *self._loader.leaving} if entry.runner is not None]

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
        await self._loader.close()

    async def _wait(self, entry: Entry) -> None:
        """Wait for a load as one of its waiters."""
        entry.waiters += 1
        try:
            await asyncio.shield(entry.loaded)
        except asyncio.CancelledError:
            if entry.waiters == 1 and entry.state is State.QUEUED:
                self._loader.give_up(entry)  # nobody wants it and nothing has been spent on it
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
        self._loader.notify()

    def _rest(self, entry: Entry) -> None:
        """An idle model's time runs; one that nobody may keep leaves."""
        if entry.state is not State.READY or not entry.idle:
            return
        if entry in self._loader.leaving or entry.session <= 0:
            self._loader.end(entry)
        else:
            entry.start_timer(self._clock(), lambda: self._expire(entry))

    def _expire(self, entry: Entry) -> None:
        if entry.idle and entry.state is State.READY:
            log.info("%s was idle for %g s and is unloaded", entry.request.name, entry.session)
            self._loader.end(entry)

    async def _take_up(self, entry: Entry, request: LoadRequest) -> None:
        """Count a request as a user of a loaded model, with a context that is large enough for it."""
        entry.users += 1
        entry.stop_timer()
        try:
            await self._fit_context(entry, request)
        except BaseException:
            self._release(entry)
            raise

    async def _fit_context(self, entry: Entry, request: LoadRequest) -> None:
        """Give the runner a larger context when a request needs one; OutOfMemory when there is no room for it.

        A request that names none gets what memory allows, whatever smaller one the model was loaded with. Idle models
        make room.
        """
        ready, account = entry.ready, entry.account
        assert ready is not None
        fixed = account.weights + account.scratch
        wanted = choose_context(request.context_length, ready, self._loader.ledger.free_beside(account) - fixed)
        needed = fixed + row_bytes(wanted, ready)
        while wanted > entry.context and entry.state is State.READY:
            if needed <= self._loader.ledger.free_beside(account):
                entry.context, account.row = wanted, row_bytes(wanted, ready)
                self._loader.share(entry)
                return
            if not request.context_length:
                return
            idle = self._loader.idle()
            free = self._loader.ledger.free_beside(account, *(other.account for other in idle))
            if needed > free:
                raise OutOfMemory(
                    f"model {request.name} requires {readable(needed)} with a context of {wanted} tokens but only"
                    f" {readable(free)} are available; lower num_ctx"
                )
            await self._loader.end(idle[0])
