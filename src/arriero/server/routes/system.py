"""The small endpoints: what this server is, and what it does not serve, said clearly."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from arriero import __version__
from arriero.errors import Forbidden
from arriero.server.routes.replies import json_reply

COMPATIBLE_VERSION = "0.32.15"
"""The Ollama version whose API we claim to speak: clients switch features on by it."""


async def root(_request: Request) -> Response:
    """GET and HEAD /: the heartbeat that clients look for, word for word."""
    return PlainTextResponse("Ollama is running")


async def version(_request: Request) -> Response:
    """GET /api/version."""
    return json_reply({"version": COMPATIBLE_VERSION, "arriero": __version__})


async def status(_request: Request) -> Response:
    """GET /api/status: nothing here ever leaves the machine."""
    return json_reply({"cloud": {"disabled": True, "source": "config"}})


async def no_account(_request: Request) -> Response:
    """POST /api/me and /api/signout: there are no accounts."""
    return json_reply({"error": "unauthorized: this server is local only and has no accounts"}, 401)


async def no_cloud(request: Request) -> Response:
    """The endpoints that a cloud would answer."""
    what = request.url.path.rpartition("/")[2].replace("_", " ").replace("-", " ")
    raise Forbidden(f"ollama cloud is disabled: {what} is unavailable")


ROUTES = [
    Route("/", root, methods=["GET"]),
    Route("/api/version", version, methods=["GET"]),
    Route("/api/status", status, methods=["GET"]),
    Route("/api/me", no_account, methods=["POST"]),
    Route("/api/signout", no_account, methods=["POST"]),
    Route("/api/user/keys/{key:path}", no_account, methods=["DELETE"]),
    Route("/api/experimental/web_search", no_cloud, methods=["POST"]),
    Route("/api/experimental/web_fetch", no_cloud, methods=["POST"]),
    Route("/api/experimental/model-recommendations", no_cloud, methods=["GET"]),
]
