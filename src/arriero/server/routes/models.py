"""Managing stored and loaded models: tags, show, ps, copy, delete."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from arriero.errors import InvalidRequest
from arriero.options import check_options
from arriero.scheduler import LoadedModel
from arriero.server.models import find
from arriero.server.routes.replies import json_reply
from arriero.server.schemas.ollama import CopyRequest, ModelRequest, local_timestamp
from arriero.server.schemas.wire import read_request
from arriero.server.services import services_of
from arriero.store.describe import details_of, draft_of, model_info, modelfile_of, parameters_of
from arriero.store.model import Details, StoredModel
from arriero.store.names import Name
from arriero.store.tensors import StoredTensor, TensorGroup, tensor_groups, tensors

_FOREVER_SECONDS = 292 * 365.25 * 86400.0
"""How far ahead "never" is shown: clients read a date there."""


async def tags(request: Request) -> Response:
    """GET /api/tags: every stored model, newest first."""
    store = services_of(request).store

    def listed() -> list[dict[str, Any]]:
        return [_listing(model) for model in store.list()]

    return json_reply({"models": await asyncio.to_thread(listed)})


def _listing(model: StoredModel) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": str(model.name), "model": str(model.name)}
    if model.config.remote_model:
        entry |= {"remote_model": model.config.remote_model, "remote_host": model.config.remote_host}
    entry |= {
        "modified_at": local_timestamp(model.modified_at.timestamp()),
        "size": model.size,
        "digest": model.digest,
        "details": _details(model.details),
    }
    if model.capabilities:
        entry["capabilities"] = model.capabilities
    if model.draft is not None:
        entry["draft"] = msgspec.to_builtins(model.draft)
    return entry


def _details(details: Details) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(details)
    for name in ("context_length", "embedding_length"):
        if not shown[name]:
            del shown[name]
    return shown


async def show(request: Request) -> Response:
    """POST /api/show: everything that is known about one model."""
    asked = await read_request(request, ModelRequest)
    if not asked.wanted:
        raise InvalidRequest("model is required")
    store = services_of(request).store
    return json_reply(await asyncio.to_thread(lambda: _description(find(store, asked.wanted), asked)))


def _description(model: StoredModel, asked: ModelRequest) -> dict[str, Any]:
    shown = _overlaid(model, asked)
    entry: dict[str, Any] = {
        "license": "\n".join(shown.licenses),
        "modelfile": modelfile_of(shown),
        "parameters": parameters_of(shown),
        "template": shown.template or shown.chat_template or "",
        "system": shown.system or "",
        "renderer": shown.renderer,
        "parser": shown.parser,
        "messages": [{"role": m.get("role", ""), "content": m.get("content", "")} for m in shown.messages],
        "remote_model": shown.config.remote_model,
        "remote_host": shown.config.remote_host,
        "capabilities": shown.capabilities,
        "requires": shown.config.requires,
    }
    entry = {name: value for name, value in entry.items() if value}
    listed = tensors(model)
    entry["details"] = _details(details_of(shown))
    entry["modified_at"] = local_timestamp(shown.modified_at.timestamp())
    entry["model_info"] = model_info(model, verbose=asked.verbose, listed=listed)
    # Ours: other clients ignore them.
    entry["tensor_groups"] = [_group(group) for group in tensor_groups(listed)]
    if asked.verbose or model.format == "gguf":
        entry["tensors"] = [_tensor(tensor) for tensor in listed]
    draft = draft_of(shown)
    if draft is not None:
        beside = tensors(model, draft=True)
        entry["draft"] = msgspec.to_builtins(draft)
        entry["draft"]["tensor_groups"] = [_group(group) for group in tensor_groups(beside)]
        if asked.verbose:
            entry["draft"]["tensors"] = [_tensor(tensor) for tensor in beside]
    return entry


def _tensor(tensor: StoredTensor) -> dict[str, Any]:
    return {"name": tensor.name, "type": tensor.type, "shape": tensor.shape}


def _group(group: TensorGroup) -> dict[str, Any]:
    return {
        "name": group.name,
        "type": group.type,
        "count": group.count,
        "parameters": group.parameters,
        "bytes": group.nbytes,
    }


def _overlaid(model: StoredModel, asked: ModelRequest) -> StoredModel:
    """The model as it would be with the request's system prompt and options."""
    if asked.system is None and not asked.options:
        return model
    shown = replace(model)
    if asked.system is not None:
        vars(shown)["system"] = asked.system
    vars(shown)["params"] = model.params | check_options(asked.options)
    return shown


async def ps(request: Request) -> Response:
    """GET /api/ps: every model that is loaded, or on its way, the longest-lived first."""
    services = services_of(request)
    loaded = services.scheduler.loaded()
    stored = {model.digest: model for model in await asyncio.to_thread(services.store.list)} if loaded else {}
    return json_reply({"models": [_loaded(model, stored.get(model.key)) for model in loaded]})


def _loaded(model: LoadedModel, stored: StoredModel | None) -> dict[str, Any]:
    details = _details(Details() if stored is None else stored.details)
    details.pop("context_length", None)
    details.pop("embedding_length", None)
    ends = min(model.expires_at, time.time() + _FOREVER_SECONDS)
    return {
        "name": model.name,
        "model": model.name,
        "size": model.weight_bytes,
        "digest": model.key,
        "details": details,
        "expires_at": local_timestamp(ends),
        "size_vram": model.weight_bytes if model.device.startswith("gpu") else 0,
        "context_length": model.context_length,
        # Ours: other clients ignore them.
        "state": model.state,
        "loaded_fraction": model.loaded_fraction,
        "reserved_bytes": model.reserved_bytes,
        "device": model.device,
        "requests": model.requests,
        "drafting": None if model.drafting is None else dataclasses.asdict(model.drafting),
    }


async def copy(request: Request) -> Response:
    """POST /api/copy."""
    asked = await read_request(request, CopyRequest)
    _check_name("source", asked.source)
    _check_name("destination", asked.destination)
    await asyncio.to_thread(services_of(request).store.copy, asked.source, asked.destination)
    return Response()


def _check_name(field: str, text: str) -> None:
    try:
        Name.parse(text)
    except InvalidRequest as error:
        raise InvalidRequest(f'{field} "{text}" is invalid: {error}') from None


async def delete(request: Request) -> Response:
    """DELETE /api/delete, also of a damaged model; a runner that holds it loaded is told to go once it is idle."""
    services = services_of(request)
    asked = await read_request(request, ModelRequest)
    name = asked.wanted
    _check_name("name", name)
    await services.let_go(await asyncio.to_thread(services.store.delete, name))
    return Response()


ROUTES = [
    Route("/api/tags", tags, methods=["GET"]),
    Route("/api/ps", ps, methods=["GET"]),
    Route("/api/show", show, methods=["POST"]),
    Route("/api/copy", copy, methods=["POST"]),
    Route("/api/delete", delete, methods=["DELETE"]),
]
