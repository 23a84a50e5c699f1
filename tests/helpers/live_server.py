"""A real server on loopback in a thread, with runners that play scripts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from arriero.scheduler import Scheduler
from arriero.server.app import Server, create_app
from arriero.server.listen import bind
from arriero.server.services import Services
from arriero.settings import Settings
from arriero.store.store import Store


class LiveServer:
    """A server that runs; `url` is where."""

    def __init__(self, settings: Settings, scheduler: Scheduler) -> None:
        self.settings = settings
        self.store = Store.from_settings(settings)
        self.scheduler = scheduler
        self.app = create_app(settings, store=self.store, scheduler=scheduler)
        self._socket = bind("127.0.0.1", 0)
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._server = Server(self.app)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.loop: asyncio.AbstractEventLoop | None = None

    @property
    def services(self) -> Services:
        return self.app.state.services

    def call(self, function: Any) -> Any:
        """The result of a function that must run in the server's loop."""

        async def run() -> Any:
            return function()

        assert self.loop is not None
        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(10)

    def rows(self) -> int:
        """Rows that runners still work on."""
        return self.call(
            lambda: sum(len(entry.runner.streams) for entry in self.scheduler._entries.values() if entry.runner)
        )

    def start(self) -> None:
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise RuntimeError("the server ended while it started")
            threading.Event().wait(0.01)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive(), "the server did not stop"

    def _run(self) -> None:
        async def serve() -> None:
            self.loop = asyncio.get_running_loop()
            await self._server.serve(sockets=[self._socket])

        asyncio.run(serve())


@contextmanager
def live_server(folder: Path, runner_command: Sequence[str], **changes: Any) -> Iterator[LiveServer]:
    """A running server with its store in a folder; `changes` are settings."""
    environ = {"ARRIERO_HOME": str(folder), "OLLAMA_MODELS": str(folder / "none")}
    # Most tests that end a server want to see replies cut off.
    settings = replace(Settings.from_environ(environ), port=0, **{"shutdown_grace": 0.0, **changes})
    server = LiveServer(settings, Scheduler(settings, runner_command=runner_command))
    server.start()
    try:
        yield server
    finally:
        server.stop()
