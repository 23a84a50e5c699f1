"""The outermost middleware: an id, a count and one log line a request, and a clean 500 for what nobody expected."""

from __future__ import annotations

import ipaddress
import logging
import re
import secrets
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from arriero.server.errors import place, report, scoped_error
from arriero.server.metrics import Metrics

log = logging.getLogger("arriero.server.access")

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+=@-]{0,127}")
"""What a client may call its request: nothing that could forge a line of the log."""

_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))


class AccessLog:
    """ASGI middleware; a request that ends without a status (its client left first) is logged as 499.

    A request keeps the `x-request-id` that it came with, if that is a plain one, and gets an id of ours otherwise.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics | None = None) -> None:
        self.app = app
        self.metrics = Metrics() if metrics is None else metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request and log it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.perf_counter(), 0
        asked = Headers(scope=scope).get("x-request-id", "").strip()
        number = asked if _ID.fullmatch(asked) else f"req_{secrets.token_hex(12)}"
        scope["arriero.request_id"] = number
        self.metrics.in_flight += 1

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name in ("x-request-id", "request-id"):  # OpenAI's clients read the one, Anthropic's the other
                    headers[name] = number
            await send(message)

        try:
            await self.app(scope, receive, send_and_note)
        except Exception as error:  # noqa: BLE001  (the last place where a client can still be told)
            report(error, place(scope))
            if not status:
                await scoped_error(scope, error)(scope, receive, send_and_note)
        finally:
            elapsed = time.perf_counter() - started
            log.info("%s %d %.3fs %s %s", place(scope), status or 499, elapsed, _client(scope), number)
            self.metrics.in_flight -= 1
            method, route = scope["method"], _route(scope)
            self.metrics.requests.add(1, method if method in _METHODS else "other", route, str(status or 499))
            self.metrics.request_seconds.observe(elapsed, route)


def _client(scope: Scope) -> str:
    """Who asked. A proxy on this machine says for whom it asks, in words of its own: only an address is believed."""
    found = scope["client"][0] if scope.get("client") else ""
    try:
        return str(ipaddress.ip_address(found))
    except ValueError:
        return "-"


def _route(scope: Scope) -> str:
    """The path of the route that answered, parameters as they are declared; `other` for what nobody serves."""
    return str(getattr(scope.get("route"), "path", "other"))
