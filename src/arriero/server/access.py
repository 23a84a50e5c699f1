"""The outermost middleware: an id and one log line a request, and a clean 500 for what nobody expected."""

from __future__ import annotations

import logging
import secrets
import time

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from arriero.server.errors import place, report, scoped_error

log = logging.getLogger("arriero.server.access")


class AccessLog:
    """ASGI middleware; a request that ends without a status (its client left first) is logged as 499."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request and log it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.perf_counter(), 0
        scope["arriero.request_id"] = number = f"req_{secrets.token_hex(12)}"

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
            client = scope["client"][0] if scope.get("client") else "-"
            elapsed = time.perf_counter() - started
            log.info("%s %d %.3fs %s %s", place(scope), status or 499, elapsed, client, number)
