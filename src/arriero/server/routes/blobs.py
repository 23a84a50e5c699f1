"""Uploading the files that a model is created from: `/api/blobs/sha256:<hex>`."""

from __future__ import annotations

import asyncio
import logging

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from arriero.errors import Cancelled, InvalidRequest
from arriero.server.services import services_of

log = logging.getLogger(__name__)

_FLUSH = 4 << 20
"""Bytes gathered before one write: a thread hop for every 64 KiB packet would halve the speed of an upload."""


async def has_blob(request: Request) -> Response:
    """HEAD: whether the store holds the blob."""
    store, digest = services_of(request).store, request.path_params["digest"]
    found = await asyncio.to_thread(store.find_blob, digest)
    return Response(status_code=200 if found else 404)


async def put_blob(request: Request) -> Response:
    """POST: the body becomes the blob if its hash is the name; anything else leaves nothing behind."""
    store, digest = services_of(request).store, request.path_params["digest"]
    if await asyncio.to_thread(store.blobs.has, digest):
        async for _ in request.stream():
            continue  # a client that is still sending would not read the answer
        return Response(status_code=200)
    announced = int(request.headers.get("content-length", 0))
    with store.blobs.writer() as writer:
        gathered = bytearray()
        try:
            async for piece in request.stream():
                gathered += piece
                if len(gathered) >= _FLUSH:
                    await asyncio.to_thread(writer.write, bytes(gathered))
                    gathered.clear()
        except ClientDisconnect:
            raise Cancelled(f"the upload of {digest} broke off after {writer.size} bytes") from None
        await asyncio.to_thread(writer.write, bytes(gathered))
        if announced and writer.size != announced:
            raise InvalidRequest(f"the upload of {digest} ended after {writer.size} of {announced} bytes")
        await asyncio.to_thread(writer.commit, digest)
    return Response(status_code=201)


ROUTES = [
    Route("/api/blobs/{digest}", has_blob, methods=["HEAD"]),
    Route("/api/blobs/{digest}", put_blob, methods=["POST"]),
]
