"""Errors → HTTP: the one place that knows which class is which status, and the shape of errors in each API."""

from __future__ import annotations

import logging
from typing import Literal
from urllib.parse import quote

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Scope

from arriero.errors import (
    ArrieroError,
    Cancelled,
    Forbidden,
    InvalidRequest,
    NotFound,
    PromptTooLong,
    ServerBusy,
    Unauthorized,
)

log = logging.getLogger(__name__)

JSON = "application/json; charset=utf-8"

_STATUS: dict[type[BaseException], int] = {
    InvalidRequest: 400,
    Unauthorized: 401,
    Forbidden: 403,
    NotFound: 404,
    Cancelled: 499,
    ServerBusy: 503,
}


_OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    503: "overloaded_error",
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


def api_of(scope: Scope) -> Literal["native", "openai", "anthropic"]:
    """Whose shapes a request expects: by its path, and on the paths that both others have by Anthropic's own header."""
    path = scope["path"]
    if not path.startswith("/v1/"):
        return "native"
    versioned = any(name.lower() == b"anthropic-version" for name, _ in scope["headers"])
    messages = path == "/v1/messages" or path.startswith("/v1/messages/")
    return "anthropic" if messages or (versioned and path.startswith("/v1/models")) else "openai"


def request_id(scope: Scope) -> str:
    """The request's id, which replies carry as a header and the log shows."""
    return str(scope.get("arriero.request_id", ""))


def scoped_error(scope: Scope, error: BaseException) -> Response:
    """An error reply with its status, in the shape of the request's API."""
    return Response(scoped_body(scope, error), status_of(error), media_type=JSON)


def scoped_body(scope: Scope, error: BaseException) -> bytes:
    """The body of such a reply; also what a stream that broke says last."""
    if api_of(scope) == "native":
        return error_body(error)
    message, code = message_of(error), None
    if isinstance(error, Unauthorized):
        code = "invalid_api_key"
    if isinstance(error, PromptTooLong):
        # Agents look for these words, and shorten their history when they find them.
        code = "context_length_exceeded"
        message = f"prompt is too long: {message}" if api_of(scope) == "anthropic" else message
    return _shaped(scope, status_of(error), message, code)


def _shaped(scope: Scope, status: int, message: str, code: str | None) -> bytes:
    if api_of(scope) == "anthropic":
        kind = _ANTHROPIC_TYPES.get(status, "api_error")
        shown = {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id(scope)}
        return msgspec.json.encode(shown)
    kind = _OPENAI_TYPES.get(status, "api_error")
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": code}})


async def arriero_error(request: Request, error: Exception) -> Response:
    """Starlette handler for our own tree."""
    report(error, place(request.scope))
    return scoped_error(request.scope, error)


async def http_error(request: Request, error: Exception) -> Response:
    """Starlette handler for what the router refuses: plain text, as Ollama's; under /v1 that API's own shape."""
    assert isinstance(error, HTTPException)
    if api_of(request.scope) != "native":
        what = {404: "is not served", 405: f"does not take {request.method}"}.get(error.status_code, error.detail)
        body = _shaped(request.scope, error.status_code, f"{request.url.path} {what}", None)
        return Response(body, error.status_code, error.headers, media_type=JSON)
    text = {404: "404 page not found", 405: "405 method not allowed"}.get(error.status_code, error.detail)
    return PlainTextResponse(text, error.status_code, error.headers)
