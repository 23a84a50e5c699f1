"""`/api/create`: a model from uploaded files or from another model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from arriero.chat.model_text import unknown_names
from arriero.create.create import create, prepared
from arriero.errors import ArrieroError, Cancelled, NotFound
from arriero.server.errors import report as log_error
from arriero.server.routes.replies import json_reply
from arriero.server.routes.transfer import pulling
from arriero.server.schemas.ollama import CreateRequest
from arriero.server.schemas.wire import read_request
from arriero.server.services import Services, services_of
from arriero.server.stream import ndjson, while_connected
from arriero.store.model import StoredModel
from arriero.store.names import Name
from arriero.store.store import Store


async def create_route(request: Request) -> Response:
    """POST /api/create: statuses as they come, or only the last one."""
    asked = await read_request(request, CreateRequest)
    statuses = _statuses(services_of(request), asked)
    if asked.stream:
        return ndjson(statuses)
    return json_reply(await while_connected(request.receive, _last(statuses)))


async def _statuses(services: Services, asked: CreateRequest) -> AsyncGenerator[dict[str, Any], None]:
    """What `create` reports from its thread; closing the generator ends the import, which then leaves nothing."""
    store, loop = services.store, asyncio.get_running_loop()
    for problem in unknown_names(asked.renderer, asked.parser):
        yield {"status": f"warning: {problem}"}
    for name in await asyncio.to_thread(_missing, store, asked):
        async with aclosing(_pulled(services, name, asked)) as pulled:
            async for told in pulled:
                yield told
    replaced = await asyncio.to_thread(_digest, store, asked.model or asked.name)
    queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
    left = threading.Event()

    def report(status: dict[str, Any]) -> None:
        if left.is_set():
            raise Cancelled("the client left during the import")
        loop.call_soon_threadsafe(queue.put_nowait, status)

    def end(work: asyncio.Task[StoredModel]) -> None:
        # Asked for in any case: the client may have left before it.
        error = None if work.cancelled() else work.exception()
        if left.is_set() and error is not None and not isinstance(error, Cancelled):
            log_error(error, f"the import of {asked.model or asked.name}, whose client has left,")
        queue.put_nowait(None)

    work = asyncio.create_task(asyncio.to_thread(create, store, asked, report))
    work.add_done_callback(end)
    try:
        while (status := await queue.get()) is not None:
            yield status
        await work
        if replaced:
            await services.let_go(replaced)
    finally:
        left.set()
        await asyncio.wait((work,))


def _missing(store: Store, asked: CreateRequest) -> list[Name]:
    """Models that the request is made of and the store has not; raises what is wrong with the request by itself."""
    request = prepared(asked)
    names = [Name.parse(text) for text in (request.from_, request.draft) if text]
    return [name for name in dict.fromkeys(names) if name not in store]


async def _pulled(services: Services, name: Name, asked: CreateRequest) -> AsyncGenerator[dict[str, Any], None]:
    """The statuses of a pull but the last; NotFound with the reason when it fails."""
    try:
        async with aclosing(pulling(services, name, insecure=asked.insecure)) as statuses:
            async for status in statuses:
                if status["status"] != "success":
                    yield status
    except Cancelled:
        raise
    except ArrieroError as error:
        raise NotFound(f"model '{name}' not found, and it could not be pulled: {error}") from None


def _digest(store: Store, name: str) -> str:
    """The digest of a stored model, '' when there is none (or no such name)."""
    try:
        return store.get(name).digest
    except ArrieroError:
        return ""


async def _last(statuses: AsyncGenerator[dict[str, Any], None]) -> dict[str, Any]:
    status: dict[str, Any] = {}
    async with aclosing(statuses):
        async for status in statuses:  # noqa: B007  (only the last one counts)
            continue
    return status


ROUTES = [Route("/api/create", create_route, methods=["POST"])]
