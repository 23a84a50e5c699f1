"""Moving models to and from registries, and checking them: `/api/pull`, `/api/push`, `/api/verify`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from arriero.errors import ArrieroError, Cancelled, InvalidRequest
from arriero.server.routes.replies import json_reply
from arriero.server.schemas.ollama import ModelRequest, VerifyRequest
from arriero.server.schemas.wire import read_request
from arriero.server.services import Services, services_of
from arriero.server.stream import ndjson, while_connected
from arriero.settings import Settings
from arriero.store.names import Name
from arriero.store.registry.hub import is_hub, pull_from_hub
from arriero.store.registry.key import Key
from arriero.store.registry.limits import Limits
from arriero.store.registry.pull import pull
from arriero.store.registry.push import push
from arriero.store.verify import verify

_Report = Callable[[dict[str, Any]], None]


async def pull_route(request: Request) -> Response:
    """POST /api/pull: statuses as they come, or only the last one."""
    asked = await read_request(request, ModelRequest)
    name = _name(asked)
    return await _reply(request, asked, pulling(services_of(request), name, insecure=asked.insecure))


async def pulling(services: Services, name: Name, *, insecure: bool = False) -> AsyncGenerator[dict[str, Any], None]:
    """The statuses of a pull, shared with whoever pulls the same model; a model that it replaces is unloaded."""
    store, settings = services.store, services.settings
    replaced = await asyncio.to_thread(_digest, services, name)
    work: Callable[[_Report, threading.Event], object]
    if is_hub(name):
        work = partial(_hub, services, name)
    else:
        key = Key(settings.home)
        work = partial(pull, store, name, key=key, limits=limits_of(settings), insecure=insecure)
    statuses = services.transfers.follow(("pull", name.key, name.scheme, insecure), f"the pull of {name}", work)
    async with aclosing(statuses):
        async for status in statuses:
            yield status
    if replaced and replaced != await asyncio.to_thread(_digest, services, name):
        await services.let_go(replaced)


def _hub(services: Services, name: Name, report: _Report, stop: threading.Event) -> None:
    """Files of a hub's repository, then the import that makes a model of them."""
    from arriero.create.create import create
    from arriero.create.request import CreateRequest

    def reported(status: dict[str, Any]) -> None:
        if stop.is_set():
            raise Cancelled("the pull was given up")
        report(status)

    store = services.store
    with pull_from_hub(store, name, report, stop, limits=limits_of(services.settings)) as files:
        create(store, CreateRequest(model=str(name), files=files), reported)


async def push_route(request: Request) -> Response:
    """POST /api/push: statuses as they come, or only the last one."""
    asked = await read_request(request, ModelRequest)
    services, name = services_of(request), _name(asked)
    key, limits = Key(services.settings.home), limits_of(services.settings)
    work = partial(push, services.store, name, key=key, limits=limits, insecure=asked.insecure)
    statuses = services.transfers.follow(("push", name.key, name.scheme, asked.insecure), f"the push of {name}", work)
    return await _reply(request, asked, statuses)


async def verify_route(request: Request) -> Response:
    """POST /api/verify: every blob of one model, or of all, is hashed again and read; problems come as statuses."""
    asked = await read_request(request, VerifyRequest)
    services = services_of(request)
    work = partial(verify, services.store, asked.wanted, repair=asked.repair)
    statuses = services.transfers.follow(("verify", asked.wanted, asked.repair), "the check of the store", work)
    return await _reply(request, asked, statuses)


async def _reply(request: Request, asked: ModelRequest, statuses: AsyncGenerator[dict[str, Any], None]) -> Response:
    if asked.stream:
        return ndjson(statuses)
    return json_reply(await while_connected(request.receive, _last(statuses)))


async def _last(statuses: AsyncGenerator[dict[str, Any], None]) -> dict[str, Any]:
    last: dict[str, Any] = {}
    async with aclosing(statuses):
        async for status in statuses:
            last = status
    return last


def limits_of(settings: Settings) -> Limits:
    """Bounds of transfers by the environment."""
    return Limits(streams=settings.transfer_streams) if settings.transfer_streams else Limits()


def _name(asked: ModelRequest) -> Name:
    if not asked.wanted:
        raise InvalidRequest("model is required")
    return Name.parse(asked.wanted)


def _digest(services: Services, name: Name) -> str:
    """The digest of a stored model, '' when there is none."""
    try:
        return services.store.get(name).digest
    except ArrieroError:
        return ""


ROUTES = [
    Route("/api/pull", pull_route, methods=["POST"]),
    Route("/api/push", push_route, methods=["POST"]),
    Route("/api/verify", verify_route, methods=["POST"]),
]
