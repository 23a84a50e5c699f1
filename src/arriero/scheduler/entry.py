"""One model in the scheduler, from the request that asks for it to the end of its process."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum

from arriero.runner.messages import Loading, Ready
from arriero.scheduler.lease import LoadedModel, LoadRequest
from arriero.scheduler.ledger import Account
from arriero.scheduler.runner import Runner


class State(Enum):
    """Where an entry stands."""

    QUEUED = "queued"
    """Waits for room."""
    LOADING = "loading"
    READY = "ready"
    STOPPING = "stopping"


class Entry:
    """A model's account, process, waiters and users. The scheduler alone changes it."""

    def __init__(self, request: LoadRequest, account: Account, session: float) -> None:
        self.request = request
        self.account = account
        self.session = session
        """Seconds that it stays when idle."""
        self.state = State.QUEUED
        self.loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the load has ended, either way."""
        self.load: asyncio.Task[None] | None = None
        self.ending: asyncio.Task[None] | None = None
        self.runner: Runner | None = None
        self.ready: Ready | None = None
        self.context = 0
        self.users = 0
        """Leases held."""
        self.waiters = 0
        """Requests that wait for the load."""
        self._progress = Loading(0, 0, "queued")
        self._listeners: set[asyncio.Queue[Loading | None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._expires_at = math.inf

    @property
    def idle(self) -> bool:
        return not self.users and not self.waiters

    @property
    def has_exited(self) -> bool:
        """Whether its process has ended by itself and this is not yet dealt with."""
        return self.runner is not None and self.runner.process.returncode is not None

    @property
    def free_rows(self) -> int:
        """Requests that it could run at once besides those it has; 0 while unknown."""
        return self.ready.max_rows - self.users if self.ready else 0

    @property
    def queued_rows(self) -> int:
        """Requests that wait inside the runner."""
        return max(0, -self.free_rows) if self.ready else 0

    def start_timer(self, now: float, expire: Callable[[], object]) -> None:
        """Begin the idle time anew; `now` is Unix time."""
        self.stop_timer()
        self._expires_at = now + self.session
        if math.isfinite(self.session):
            self._timer = asyncio.get_running_loop().call_later(self.session, expire)

    def stop_timer(self) -> None:
        """In use: no end in sight."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def report(self, progress: Loading) -> None:
        """Tell those who listen to the load."""
        self._progress = progress
        for queue in self._listeners:
            queue.put_nowait(progress)

    def finish_load(self) -> None:
        """Wake the waiters: the model is ready."""
        self.state = State.READY
        self._end_load()
        if not self.loaded.done():
            self.loaded.set_result(None)

    def fail_load(self, error: BaseException) -> None:
        """Wake the waiters with the error that ended the load."""
        self.state = State.STOPPING
        self._end_load()
        if not self.loaded.done():
            self.loaded.set_exception(error)
            self.loaded.exception()  # marks it as seen: all waiters may have left

    @contextmanager
    def listening(self) -> Iterator[asyncio.Queue[Loading | None]]:
        """A queue of the load's progress, starting with the latest and ending with None."""
        queue: asyncio.Queue[Loading | None] = asyncio.Queue()
        queue.put_nowait(self._progress)
        self._listeners.add(queue)
        try:
            yield queue
        finally:
            self._listeners.discard(queue)

    def describe(self, now: float) -> LoadedModel:
        """Its line in a listing."""
        done, total = self._progress.done, self._progress.total
        ready = self.state is State.READY
        return LoadedModel(
            key=self.request.key,
            name=self.request.name,
            state="ready" if ready else "loading" if self.state is State.LOADING else "queued",
            weight_bytes=self.account.weights,
            reserved_bytes=self.account.reserved,
            context_length=self.context,
            device=self.ready.device if self.ready else "",
            expires_at=self._expires_at if self._timer is not None else now + self.session,
            loaded_fraction=1.0 if ready else done / total if total else 0.0,
            requests=self.users,
            drafting=self.runner.drafting if self.runner is not None else None,
        )

    def _end_load(self) -> None:
        for queue in self._listeners:
            queue.put_nowait(None)
