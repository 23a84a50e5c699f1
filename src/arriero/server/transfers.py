"""Pulls and pushes in flight: who asks for one that is under way follows it, and it ends when all have left."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Hashable
from functools import partial
from typing import Any

from arriero.errors import Cancelled
from arriero.server.errors import report as log_error

log = logging.getLogger(__name__)

Report = Callable[[dict[str, Any]], None]
Work = Callable[[Report, threading.Event], object]
"""A blocking transfer: reports its statuses, and ends with Cancelled soon after the event is set."""


class _Job:
    """One transfer in a thread of its own: a long one must not take the place of those that answer requests."""

    def __init__(self, label: str, work: Work, forget: Callable[[_Job], None]) -> None:
        self.label = label
        self.stop = threading.Event()
        self.ended = asyncio.Event()
        self.error: BaseException | None = None
        self.followers: list[asyncio.Queue[dict[str, Any] | None]] = []
        self._latest: dict[tuple[str, str], dict[str, Any]] = {}
        self._loop = asyncio.get_running_loop()
        self._work = work
        self._forget = forget
        threading.Thread(target=self._run, name=label, daemon=True).start()

    def follow(self) -> asyncio.Queue[dict[str, Any] | None]:
        """A queue that gets where every bar stands, then what comes, then None."""
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        for status in self._latest.values():
            queue.put_nowait(status)
        self.followers.append(queue)
        return queue

    def leave(self, queue: asyncio.Queue[dict[str, Any] | None]) -> None:
        """Stop following; the last one to leave ends the transfer."""
        self.followers.remove(queue)
        if not self.followers:
            self.stop.set()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self._work(lambda status: self._post(self._told, status), self.stop)
        except BaseException as caught:  # noqa: BLE001  (whatever ended it, its followers must learn of it)
            error = caught
        self._post(self._finish, error)

    def _post(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            # The server has ended meanwhile: nobody is left to tell.
            self.stop.set()

    def _told(self, status: dict[str, Any]) -> None:
        self._latest[status["status"], status.get("digest", "")] = status
        for queue in self.followers:
            queue.put_nowait(status)

    def _finish(self, error: BaseException | None) -> None:
        self.error = error
        self.ended.set()
        self._forget(self)
        if error is not None and not self.followers and not isinstance(error, Cancelled):
            log_error(error, f"{self.label}, whose clients have left,")
        for queue in self.followers:
            queue.put_nowait(None)


class Transfers:
    """The transfers of one server, by what they are about."""

    def __init__(self) -> None:
        self._jobs: dict[Hashable, _Job] = {}

    async def follow(self, key: Hashable, label: str, work: Work) -> AsyncGenerator[dict[str, Any], None]:
        """The statuses of the transfer `key`, which is begun unless it is under way; raises what ended it.

        Closing the generator leaves it.
        """
        while (job := self._jobs.get(key)) is not None and job.stop.is_set():
            await job.ended.wait()  # one that was given up, and has not noticed yet
        if job is None:
            job = self._jobs[key] = _Job(label, work, partial(self._forget, key))
        queue = job.follow()
        try:
            while (status := await queue.get()) is not None:
                yield status
            if job.error is not None:
                raise job.error
        finally:
            job.leave(queue)

    async def close(self) -> None:
        """End all transfers and wait until they have."""
        for job in list(self._jobs.values()):
            job.stop.set()
        for job in list(self._jobs.values()):
            await job.ended.wait()

    def _forget(self, key: Hashable, job: _Job) -> None:
        if self._jobs.get(key) is job:
            del self._jobs[key]
