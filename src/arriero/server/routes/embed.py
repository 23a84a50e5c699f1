"""`/api/embed` and `/api/embeddings`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from arriero.errors import InvalidRequest
from arriero.server.completion import load
from arriero.server.embedding import embed
from arriero.server.models import OpenModel
from arriero.server.parameters import settle
from arriero.server.requests import keep_alive_of
from arriero.server.routes.replies import json_reply
from arriero.server.schemas.embed import EmbeddingReply, EmbeddingRequest, EmbedReply, EmbedRequest
from arriero.server.schemas.wire import read_request
from arriero.server.services import Services, services_of
from arriero.server.stream import while_connected


async def embed_route(request: Request) -> Response:
    """POST /api/embed."""
    asked = await read_request(request, EmbedRequest)
    return json_reply(await while_connected(request.receive, _embed(services_of(request), asked)))


async def embeddings_route(request: Request) -> Response:
    """POST /api/embeddings."""
    asked = await read_request(request, EmbeddingRequest)
    return json_reply(await while_connected(request.receive, _embedding(services_of(request), asked)))


async def _embed(services: Services, asked: EmbedRequest) -> EmbedReply:
    texts = _texts(asked.input)
    if asked.dimensions < 0:
        raise InvalidRequest(f"dimensions must be positive; it is {asked.dimensions}")
    model = await services.models.open(services.store, asked.model)
    window, keep_alive = _window(services, model, asked.options), keep_alive_of(asked.keep_alive)
    if not texts:
        model.text.embedding.check(model.asked)
        await load(services, model, window, keep_alive)
        return EmbedReply(model=asked.model, embeddings=[])
    found = await embed(
        services,
        model,
        texts,
        truncate=asked.truncate,
        dimensions=asked.dimensions,
        num_ctx=window,
        keep_alive=keep_alive,
    )
    return EmbedReply(
        model=asked.model,
        embeddings=found.rows.tolist(),
        total_duration=found.total_ns,
        load_duration=found.load_ns,
        prompt_eval_count=found.tokens,
    )


async def _embedding(services: Services, asked: EmbeddingRequest) -> EmbeddingReply:
    model = await services.models.open(services.store, asked.model)
    window, keep_alive = _window(services, model, asked.options), keep_alive_of(asked.keep_alive)
    if not asked.prompt:
        model.text.embedding.check(model.asked)
        await load(services, model, window, keep_alive)
        return EmbeddingReply(embedding=[])
    found = await embed(services, model, [asked.prompt], normalise=False, num_ctx=window, keep_alive=keep_alive)
    return EmbeddingReply(embedding=found.rows[0].tolist())


def _texts(value: Any) -> list[str]:
    """The texts of an `input`: one, several, or none to load the model only."""
    if value is None or value == "":
        return []
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest("invalid input type: input must be a string or a list of strings")
    return texts


def _window(services: Services, model: OpenModel, options: dict[str, Any]) -> int:
    return settle(services.settings, model.stored.params, options).num_ctx


ROUTES = [
    Route("/api/embed", embed_route, methods=["POST"]),
    Route("/api/embeddings", embeddings_route, methods=["POST"]),
]
