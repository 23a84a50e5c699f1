"""`/v1/models`, in OpenAI's form, or in Anthropic's for clients that say so by its version header."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from arriero.server.errors import api_of
from arriero.server.models import find
from arriero.server.routes.replies import json_reply
from arriero.server.schemas.ollama import timestamp
from arriero.server.services import services_of
from arriero.store.model import StoredModel


async def models_route(request: Request) -> Response:
    """GET /v1/models: every stored model, newest first."""
    store = services_of(request).store
    anthropic = api_of(request.scope) == "anthropic"

    def listed() -> list[dict[str, Any]]:
        return [_described(model, str(model.name), anthropic) for model in store.list()]

    entries = await asyncio.to_thread(listed)
    if not anthropic:
        return json_reply({"object": "list", "data": entries})
    ids = [entry["id"] for entry in entries]
    return json_reply(
        {"data": entries, "has_more": False, "first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}
    )


async def model_route(request: Request) -> Response:
    """GET /v1/models/{name}."""
    store, name = services_of(request).store, request.path_params["name"]
    anthropic = api_of(request.scope) == "anthropic"
    return json_reply(await asyncio.to_thread(lambda: _described(find(store, name), name, anthropic)))


def _described(model: StoredModel, name: str, anthropic: bool) -> dict[str, Any]:
    made = model.modified_at.timestamp()
    if not anthropic:
        return {"id": name, "object": "model", "created": int(made), "owned_by": model.name.namespace}
    return {
        "id": name,
        "type": "model",
        "display_name": name,
        "created_at": timestamp(int(made * 1e9)),
        "lifecycle": "active",
        "max_input_tokens": model.details.context_length or None,
        "max_tokens": model.details.context_length or None,
    }


ROUTES = [
    Route("/v1/models", models_route, methods=["GET"]),
    Route("/v1/models/{name:path}", model_route, methods=["GET"]),
]
