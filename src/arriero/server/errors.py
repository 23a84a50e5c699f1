"""Errors → HTTP: the one place that knows which class is which status, and the shapes of native error replies."""

from __future__ import annotations

import logging
from urllib.parse import quote

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Scope

from arriero.errors import ArrieroError, Cancelled, Forbidden, InvalidRequest, NotFound, ServerBusy

log = logging.getLogger(__name__)

JSON = "application/json; charset=utf-8"

_STATUS: dict[type[BaseException], int] = {
    InvalidRequest: 400,
    Forbidden: 403,
    NotFound: 404,
    Cancelled: 499,
    ServerBusy: 503,
}


class BodyTooLarge(InvalidRequest):
    """A request body above the limit (413)."""


_STATUS[BodyTooLarge] = 413


def status_of(error: BaseException) -> int:
    """The HTTP status of an error: that of its nearest known class, else 500."""
    return next((_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS), 500)


def message_of(error: BaseException) -> str:
    """The text that a client may see; an unexpected error shows its class, the traceback stays in the log."""
    if isinstance(error, ArrieroError):
        return str(error)
    return f"internal error ({type(error).__name__}); the server's log has the details"


def report(error: BaseException, where: str) -> None:
    """Log what the client can't see: the traceback of an unexpected error, one line of a known one of ours."""
    if not isinstance(error, ArrieroError):
        log.error("%s failed", where, exc_info=error)
    elif status_of(error) >= 500:
        log.error("%s: %s", where, error)


def place(scope: Scope) -> str:
    """Method and path for the log, quoted as in a URL: a line end in it would forge a line."""
    return f"{scope['method']} {quote(scope['path'], safe='/:')}"


def error_body(error: BaseException) -> bytes:
    """`{"error": …}`, the body of every native error and the last line of a stream that broke."""
    return msgspec.json.encode({"error": message_of(error)})


def error_response(error: BaseException) -> Response:
    """A native error reply with its status."""
    return Response(error_body(error), status_of(error), media_type=JSON)


async def arriero_error(request: Request, error: Exception) -> Response:
    """Starlette handler for our own tree."""
    report(error, place(request.scope))
    return error_response(error)


async def http_error(_request: Request, error: Exception) -> Response:
    """Starlette handler for what the router refuses: plain text, as Ollama's."""
    assert isinstance(error, HTTPException)
    text = {404: "404 page not found", 405: "405 method not allowed"}.get(error.status_code, error.detail)
    return PlainTextResponse(text, error.status_code, error.headers)
