"""Server-sent events: framing, signs of life, and streams whose errors have the shape of their API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.types import Scope

from arriero.server.errors import scoped_error
from arriero.server.stream import Stream

QUIET_SECONDS = 10.0
"""Silence after which a sign of life is sent: a long prompt or a load takes longer than some clients wait."""

COMMENT = b": still working\n\n"
"""A sign of life that every client of server-sent events skips."""

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


def event(data: Any, name: str = "") -> bytes:
    """One event; `name` is its `event:` line."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + _encode(data) + b"\n\n"


def sse(
    scope: Scope,
    pieces: AsyncGenerator[bytes, None],
    *,
    error_piece: Callable[[BaseException], bytes],
    sign: Callable[[], bytes] = lambda: COMMENT,
    quiet: float | None = None,
) -> Stream:
    """A stream of events, with `sign()` after `quiet` seconds of silence (`QUIET_SECONDS` by default).

    An error before the first piece is an ordinary reply with its status; a later one becomes `error_piece`, the last.
    """
    reply = Stream(
        alive(pieces, sign, QUIET_SECONDS if quiet is None else quiet),
        media_type="text/event-stream",
        error_piece=error_piece,
        error_reply=lambda error: scoped_error(scope, error),
    )
    reply.headers["cache-control"] = "no-cache"
    return reply


async def alive(
    pieces: AsyncGenerator[bytes, None], sign: Callable[[], bytes], quiet: float
) -> AsyncGenerator[bytes, None]:
    """The pieces, and a sign of life whenever `quiet` seconds pass without one."""
    waiting: asyncio.Future[bytes] | None = None
    async with aclosing(pieces):
        try:
            while True:
                waiting = asyncio.ensure_future(anext(pieces))
                while not (await asyncio.wait((waiting,), timeout=quiet))[0]:
                    yield sign()
                try:
                    piece = waiting.result()
                except StopAsyncIteration:
                    return
                yield piece
        finally:
            # The generator can't be closed while a task still runs it.
            if waiting is not None and not waiting.done():
                waiting.cancel()
                await asyncio.wait((waiting,))
