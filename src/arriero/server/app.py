"""The server put together: settings, store, scheduler and text cache; the routes; start and stop."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import FrameType

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from arriero import __version__
from arriero.errors import ArrieroError
from arriero.scheduler import Scheduler
from arriero.server.access import AccessLog
from arriero.server.compat.responses_store import ResponsesStore
from arriero.server.errors import arriero_error, http_error
from arriero.server.guard import Guard, Origins, is_loopback
from arriero.server.keys import KeyCheck
from arriero.server.listen import bind
from arriero.server.metrics import Metrics
from arriero.server.models import Models
from arriero.server.routes import (
    anthropic,
    blobs,
    create,
    embed,
    metrics,
    models,
    ollama,
    openai,
    responses,
    system,
    transfer,
    v1_embeddings,
    v1_models,
)
from arriero.server.services import Services
from arriero.settings import Settings, unread
from arriero.store.store import Store

log = logging.getLogger(__name__)

_APIS = (
    *(system, metrics, models, blobs, create, transfer, ollama, embed),
    *(openai, responses, anthropic, v1_embeddings, v1_models),
)

_PATIENCE = 5
"""Seconds that connections have to end once their replies were cut off."""

_HEADERS = 64 << 10
"""Bytes of a request's head; a longer one is a 400 before anything of it is looked at."""


def create_app(settings: Settings, *, store: Store | None = None, scheduler: Scheduler | None = None) -> Starlette:
    """The ASGI application; the scheduler (made here unless given) is closed, with its runners, when the app stops."""

    counted = Metrics()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        services = Services(
            settings=settings,
            store=Store.from_settings(settings) if store is None else store,
            models=Models(),
            scheduler=Scheduler(settings) if scheduler is None else scheduler,
            metrics=counted,
        )
        app.state.services = services
        app.state.responses = ResponsesStore()
        if not settings.no_prune:
            await asyncio.to_thread(_prune, services.store)
        try:
            yield
        finally:
            await services.transfers.close()
            await services.scheduler.close()

    return Starlette(
        routes=[route for api in _APIS for route in api.ROUTES],
        middleware=[
            Middleware(AccessLog, metrics=counted),
            Middleware(Guard, listen_host=settings.host, origins=Origins(settings.origins)),
            Middleware(KeyCheck, keys=settings.api_keys),
        ],
        exception_handlers={ArrieroError: arriero_error, HTTPException: http_error},
        lifespan=lifespan,
    )


def _prune(store: Store) -> None:
    """A store that can't be cleaned can still be served."""
    try:
        removed = store.prune()
    except (ArrieroError, OSError) as error:
        log.warning("the model store was not cleaned: %s", error)
    else:
        if removed:
            log.info("removed %d unused files from the model store", removed)


def exposure(settings: Settings) -> str | None:
    """What to tell whoever opens a server to others without a key; None for the rest."""
    if is_loopback(settings.host) or settings.api_keys:
        return None
    return (
        f"everyone who can reach {settings.host} can use this server and change its models: set ARRIERO_API_KEY, or "
        "listen on 127.0.0.1"
    )


def serve(settings: Settings) -> None:
    """Serve until SIGINT or SIGTERM, then end the runners; AddressInUse when the port is taken."""
    logging.basicConfig(
        level=logging.DEBUG if settings.debug else logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    # One line a request, with the addresses of files, which may be signed: not for a log.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    sock = bind(settings.host, settings.port)
    host, port = sock.getsockname()[:2]
    shown = f"[{host}]" if sock.family == socket.AF_INET6 else host
    log.info("arriero %s listens on http://%s:%d", __version__, shown, port)
    for sentence in unread():
        log.warning("%s", sentence)
    if (warning := exposure(settings)) is not None:
        log.warning("%s", warning)
    # uvicorn hands a caught signal back to these handlers once it has shut down; the default ones would end the
    # process with a signal's status although all went well.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    Server(create_app(settings)).run(sockets=[sock])


class Server(uvicorn.Server):
    """uvicorn with our settings.

    A stop takes no new connections, gives the replies in flight time to come to their end, ends those that still run
    with an error each, and then the connections. A second signal ends the waiting.
    """

    def __init__(self, app: Starlette) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                headers=[("Server", f"arriero/{__version__}")],
                timeout_graceful_shutdown=_PATIENCE,
                timeout_keep_alive=75,
                ws="none",
                # Pinned: uvicorn's other parser, when it is installed, has no limit on headers.
                http="h11",
                h11_max_incomplete_event_size=_HEADERS,
            )
        )
        self._app = app

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Note a signal; the second one ends the waiting, whichever it is."""
        self.force_exit = self.force_exit or self.should_exit
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let replies end, then stop the runners, then the connections. Transfers stop at once: they can be resumed."""
        services: Services = self._app.state.services
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()  # closes those that are idle; the others close behind their reply
        await services.transfers.close()
        await self._drain(services.settings.shutdown_grace)
        await services.scheduler.close()
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()  # uvicorn leaves it out then, and logs how it is torn down

    async def _drain(self, seconds: float) -> None:
        """Wait until no request is being answered, at most so long."""
        ends = time.monotonic() + seconds
        if self.server_state.tasks and seconds > 0:
            log.info("%d requests are being answered and have %g s to end", len(self.server_state.tasks), seconds)
        while self.server_state.tasks and not self.force_exit and time.monotonic() < ends:
            await asyncio.sleep(0.02)
