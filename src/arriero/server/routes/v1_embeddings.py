"""`/v1/embeddings`: OpenAI's."""

from __future__ import annotations

import base64
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from arriero.errors import InvalidRequest, UnsupportedFeature
from arriero.server.compat.prepare import open_model
from arriero.server.embedding import embed
from arriero.server.parameters import settle
from arriero.server.requests import keep_alive_of
from arriero.server.routes.replies import json_reply
from arriero.server.schemas.openai import EMBEDDINGS, EmbeddingsRequest
from arriero.server.services import Services, services_of
from arriero.server.stream import while_connected

_FORMATS = ("float", "base64")


async def embeddings_route(request: Request) -> Response:
    """POST /v1/embeddings."""
    asked = await EMBEDDINGS.read(request)
    return json_reply(await while_connected(request.receive, _embeddings(services_of(request), asked)))


async def _embeddings(services: Services, asked: EmbeddingsRequest) -> dict[str, Any]:
    if asked.encoding_format not in _FORMATS:
        raise InvalidRequest(
            f"Invalid value for 'encoding_format' = {asked.encoding_format[:40]}. "
            "Supported values: ['float', 'base64']."
        )
    if asked.dimensions is not None and asked.dimensions < 1:
        raise InvalidRequest(f"dimensions must be at least 1; it is {asked.dimensions}")
    model = await open_model(services, asked.model)
    window = {} if asked.num_ctx is None else {"num_ctx": asked.num_ctx}
    found = await embed(
        services,
        model,
        _texts(asked.input),
        truncate=asked.truncate,
        dimensions=asked.dimensions or 0,
        num_ctx=settle(services.settings, model.stored.params, asked.options | window).num_ctx,
        keep_alive=keep_alive_of(asked.keep_alive),
    )
    rows: list[Any]
    if asked.encoding_format == "base64":
        rows = [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in found.rows]
    else:
        rows = found.rows.tolist()
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)],
        "model": asked.model,
        "usage": {"prompt_tokens": found.tokens, "total_tokens": found.tokens},
    }


def _texts(value: Any) -> list[str]:
    """The texts of an `input`, at least one; tokens are refused, since they may be another model's."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts:
        raise InvalidRequest("invalid input: it must be a string or a list of strings")
    if all(isinstance(text, str) for text in texts):
        return texts
    if all(isinstance(item, int | list) for item in texts):
        raise UnsupportedFeature("input of tokens is not supported: send the text, the model's own tokenizer cuts it")
    raise InvalidRequest("invalid input: it must be a string or a list of strings")


ROUTES = [Route("/v1/embeddings", embeddings_route, methods=["POST"])]
