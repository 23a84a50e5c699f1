"""`/v1/responses`: OpenAI's responses, stateless or kept in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from arriero.errors import InvalidRequest, NotFound, UnsupportedFeature
from arriero.server.compat.openai_request import format_of, offer_of
from arriero.server.compat.prepare import (
    ForcedCall,
    offer_prompt,
    open_model,
    prepare,
    think_of_effort,
    token_limit,
    unforced,
)
from arriero.server.compat.responses_request import (
    Item,
    definitions_of,
    items_of,
    listed,
    messages_of,
    namespaces_of,
)
from arriero.server.compat.responses_store import ResponsesStore
from arriero.server.compat.responses_writer import ResponseEvents
from arriero.server.compat.sse import event, sse
from arriero.server.completion import Generation, generate
from arriero.server.errors import message_of
from arriero.server.models import OpenModel
from arriero.server.prompts import ConversationPrompt
from arriero.server.remote_images import with_images
from arriero.server.routes.replies import json_reply
from arriero.server.schemas.responses import INCLUDES, RESPONSES, ResponseRequest
from arriero.server.services import Services, services_of
from arriero.server.stream import while_connected
from arriero.server.transcript import Delta


async def create_route(request: Request) -> Response:
    """POST /v1/responses."""
    asked = await RESPONSES.read(request)
    services, store = services_of(request), _store(request)
    _check(asked)
    items = _history(store, asked)
    writer = ResponseEvents(
        _echoed(asked),
        seal_thoughts="reasoning.encrypted_content" in asked.include,
        logprobs=_logprobs(asked),
        parallel=asked.parallel_tool_calls,
        namespaces=namespaces_of(asked.tools),
    )
    events = _events(services, store, asked, items, writer)
    if not asked.stream:
        return json_reply(await while_connected(request.receive, _whole(events, writer)))

    async def pieces() -> AsyncGenerator[bytes, None]:
        async with aclosing(events):
            async for found in events:
                yield event(found, found["type"])

    def sign() -> bytes:
        opening = writer.start()
        return b"".join(event(found, found["type"]) for found in opening) or b": still working\n\n"

    def error_piece(error: BaseException) -> bytes:
        return b"".join(event(found, found["type"]) for found in writer.fail(message_of(error)))

    return sse(request.scope, pieces(), error_piece=error_piece, sign=sign)


async def count_route(request: Request) -> Response:
    """POST /v1/responses/input_tokens: the prompt's tokens, counted without loading the model."""
    asked = await RESPONSES.read(request)
    services = services_of(request)
    _check(asked)
    items = _history(_store(request), asked)

    async def count() -> int:
        model = await open_model(services, asked.model)
        whole = await with_images(services, asked.model, items)
        return len(await asyncio.to_thread(lambda: unforced(_prompt(model, asked, whole)).whole()))

    tokens = await while_connected(request.receive, count())
    return json_reply({"object": "response.input_tokens", "input_tokens": tokens})


async def get_route(request: Request) -> Response:
    """GET /v1/responses/{id}."""
    if request.query_params.get("stream", "").lower() == "true":
        raise UnsupportedFeature("stored responses are not streamed: leave stream out")
    return json_reply(_store(request).get(request.path_params["id"]).response)


async def delete_route(request: Request) -> Response:
    """DELETE /v1/responses/{id}."""
    name = request.path_params["id"]
    _store(request).delete(name)
    return json_reply({"id": name, "object": "response", "deleted": True})


async def items_route(request: Request) -> Response:
    """GET /v1/responses/{id}/input_items: all of them on one page, the latest first unless `order` is asc."""
    items = _store(request).get(request.path_params["id"]).input
    shown = [listed(item, index) for index, item in enumerate(items)]
    if request.query_params.get("order", "desc") == "desc":
        shown.reverse()
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
    return json_reply({"object": "list", "data": shown, "has_more": False, **ends})


async def cancel_route(request: Request) -> Response:
    """POST /v1/responses/{id}/cancel: nothing runs in the background."""
    _store(request).get(request.path_params["id"])
    raise UnsupportedFeature(
        "only responses in the background can be cancelled, and there are none: close the connection"
    )


def _check(asked: ResponseRequest) -> None:
    unknown = [name for name in asked.include if name not in INCLUDES]
    if unknown:
        raise InvalidRequest(f"include holds {unknown[0][:80]!r}; it may hold {', '.join(INCLUDES)}")
    if asked.truncation not in ("auto", "disabled"):
        raise InvalidRequest('truncation must be "auto" or "disabled"')
    format_of(asked.text.format, "text.format")


def _history(store: ResponsesStore, asked: ResponseRequest) -> list[Item]:
    """All items: those of the response that this one continues, its output, and the new ones."""
    before: list[Item] = []
    if asked.previous_response_id is not None:
        try:
            kept = store.get(asked.previous_response_id)
        except NotFound as error:
            raise InvalidRequest(f"previous_response_id: {error}") from None
        before = [*kept.input, *kept.response["output"]]
    by_id = {item["id"]: item for item in before if isinstance(item.get("id"), str)}
    return before + [_resolved(by_id, item) for item in items_of(asked.input)]


def _resolved(known: dict[str, Item], item: Item) -> Item:
    if item.get("type") != "item_reference":
        return item
    name = item.get("id")
    found = known.get(name) if isinstance(name, str) else None
    if found is None:
        raise InvalidRequest(f"input: no item has the id {str(name)[:80]!r}; send the item itself")
    return found


def _prompt(model: OpenModel, asked: ResponseRequest, items: list[Item]) -> ConversationPrompt | ForcedCall:
    return offer_prompt(
        model,
        messages_of(model, items),
        offer_of(model, definitions_of(asked.tools), asked.tool_choice),
        think=think_of_effort(asked.reasoning.effort, "reasoning.effort"),
        system=asked.instructions or None,
        truncate=asked.truncate or asked.truncation == "auto",
    )


def _logprobs(asked: ResponseRequest) -> bool:
    return "message.output_text.logprobs" in asked.include or bool(asked.top_logprobs)


async def _prepare(services: Services, asked: ResponseRequest, items: list[Item]) -> Generation:
    return await prepare(
        services,
        asked.model,
        asked,
        lambda model: _prompt(model, asked, items),
        logprobs=_logprobs(asked),
        top_logprobs=asked.top_logprobs or 0,
        form=format_of(asked.text.format, "text.format"),
        form_field="text.format",
        parallel=asked.parallel_tool_calls,
        num_predict=token_limit(asked.max_output_tokens, "max_output_tokens"),
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        min_p=asked.min_p,
        seed=asked.seed,
    )


async def _events(
    services: Services, store: ResponsesStore, asked: ResponseRequest, items: list[Item], writer: ResponseEvents
) -> AsyncGenerator[dict[str, Any], None]:
    items = await with_images(services, asked.model, items)
    generation = await _prepare(services, asked, items)
    async with aclosing(generate(services, generation)) as found:
        async for item in found:
            for opening in writer.start():
                yield opening
            last = not isinstance(item, Delta)
            events = writer.feed(item) if isinstance(item, Delta) else writer.end(item)
            if last and asked.store:
                # Before the client hears that it is complete: it may continue at once.
                store.put(writer.response, items)
            for made in events:
                yield made


async def _whole(events: AsyncGenerator[dict[str, Any], None], writer: ResponseEvents) -> dict[str, Any]:
    async with aclosing(events):
        async for _ in events:
            continue
    return writer.response


def _echoed(asked: ResponseRequest) -> dict[str, Any]:
    """The fields of a response that repeat its request."""
    return {
        "model": asked.model,
        "instructions": asked.instructions,
        "previous_response_id": asked.previous_response_id,
        "tools": asked.tools,
        "tool_choice": "auto" if asked.tool_choice is None else asked.tool_choice,
        "truncation": asked.truncation,
        "parallel_tool_calls": asked.parallel_tool_calls,
        "text": {"format": asked.text.format or {"type": "text"}},
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_logprobs": asked.top_logprobs or 0,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "reasoning": {"effort": asked.reasoning.effort, "summary": asked.reasoning.summary},
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": None,
        "store": asked.store,
        "background": False,
        "service_tier": "default",
        "metadata": asked.metadata,
        "safety_identifier": None,
        "prompt_cache_key": None,
        "user": None,
    }


def _store(request: Request) -> ResponsesStore:
    store = request.app.state.responses
    assert isinstance(store, ResponsesStore)
    return store


ROUTES = [
    Route("/v1/responses", create_route, methods=["POST"]),
    Route("/v1/responses/input_tokens", count_route, methods=["POST"]),
    Route("/v1/responses/{id}", get_route, methods=["GET"]),
    Route("/v1/responses/{id}", delete_route, methods=["DELETE"]),
    Route("/v1/responses/{id}/input_items", items_route, methods=["GET"]),
    Route("/v1/responses/{id}/cancel", cancel_route, methods=["POST"]),
]
