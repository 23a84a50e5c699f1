"""The API key, when the server asks for one (`ARRIERO_API_KEY`)."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from arriero.errors import Unauthorized
from arriero.server.errors import scoped_error

_OPEN = {"/"}
"""Paths that need no key: the heartbeat, by which services and clients see that the server is up."""


class KeyCheck:
    """ASGI middleware: 401 for requests without one of the keys, as `Authorization: Bearer …` or `x-api-key: …`.

    Without keys every request passes.
    """

    def __init__(self, app: ASGIApp, *, keys: Iterable[str]) -> None:
        self.app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through, or refuse it."""
        if scope["type"] != "http" or not self._digests or scope["path"] in _OPEN:
            await self.app(scope, receive, send)
            return
        offered = _offered(Headers(scope=scope))
        # Digests are compared, each with all: neither a key's length nor its beginning shows in the time it takes.
        if sum(hmac.compare_digest(_digest(key), known) for key in offered for known in self._digests):
            await self.app(scope, receive, send)
            return
        found = "the key of this request is not the server's" if offered else "this request has none"
        reply = scoped_error(
            scope,
            Unauthorized(
                f"this server wants an API key and {found}: send 'Authorization: Bearer <key>' or 'x-api-key: <key>' "
                "(the command line takes ARRIERO_API_KEY)"
            ),
        )
        reply.headers["www-authenticate"] = "Bearer"
        await reply(scope, receive, send)


def _offered(headers: Headers) -> list[bytes]:
    """The keys of a request; clients of Anthropic's API send theirs in either way."""
    scheme, _, token = headers.get("authorization", "").strip().partition(" ")
    found = [token.strip()] if scheme.lower() == "bearer" else []
    return [key.encode("latin-1") for key in (*found, headers.get("x-api-key", "").strip()) if key]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
