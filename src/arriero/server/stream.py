"""Replies that come piece by piece, and work that ends when its client leaves.

`while_connected` runs a coroutine beside a watch on the connection; a `Stream` sends what an async generator yields.
What a piece looks like on the wire (an NDJSON line, an SSE event) is the caller's. Generators are closed explicitly at
every level: one that is left to the garbage collector would keep its row decoding meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from arriero.errors import Cancelled
from arriero.server.errors import error_body, error_response, place, report

log = logging.getLogger(__name__)
T = TypeVar("T")

NDJSON = "application/x-ndjson"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled as soon as the client closes its connection.

    The request's body must have been read. Raises Cancelled when the client left first.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Cancelled("request canceled")
        return task.result()
    finally:
        for future in (task, watch):
            future.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


class Stream(Response):
    """A reply whose pieces are sent as they come, each flushed.

    An error before the first piece is an ordinary error reply with its status; a later one becomes a last piece (made
    by `error_piece`) and the stream ends there. The generator is closed in any case, when the client leaves too.
    """

    def __init__(
        self,
        pieces: AsyncGenerator[bytes, None],
        *,
        media_type: str,
        error_piece: Callable[[BaseException], bytes],
        error_reply: Callable[[BaseException], Response] = error_response,
    ) -> None:
        super().__init__(media_type=media_type)
        del self.headers["content-length"]
        self.pieces = pieces
        self.error_piece = error_piece
        self.error_reply = error_reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything, or stop when the client leaves."""
        try:
            await while_connected(receive, self._send(scope, receive, send))
        except Cancelled:
            log.info("%s: the client left", place(scope))

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            async with aclosing(self.pieces) as pieces:
                async for piece in pieces:
                    if not started:
                        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                        started = True
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        except Exception as error:  # noqa: BLE001  (whatever broke, the client must learn that it broke)
            report(error, place(scope))
            if not started:
                await self.error_reply(error)(scope, receive, send)
                return
            await send({"type": "http.response.body", "body": self.error_piece(error), "more_body": True})
        if not started:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def ndjson(objects: AsyncGenerator[Any, None]) -> Stream:
    """A stream of one JSON object a line; a late error is a line `{"error": …}`."""
    return Stream(_lines(objects), media_type=NDJSON, error_piece=lambda error: error_body(error) + b"\n")


async def _lines(objects: AsyncGenerator[Any, None]) -> AsyncGenerator[bytes, None]:
    encoder = msgspec.json.Encoder()
    async with aclosing(objects):
        async for item in objects:
            yield encoder.encode(item) + b"\n"
