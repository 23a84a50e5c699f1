"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from arriero.errors import InvalidRequest
from arriero.server.compat.anthropic_request import form_of, prompt_of
from arriero.server.compat.anthropic_writer import MessageEvents
from arriero.server.compat.prepare import open_model, prepare, stops_of, unforced
from arriero.server.compat.sse import event, sse
from arriero.server.completion import Generation, generate
from arriero.server.errors import scoped_body
from arriero.server.remote_images import with_images
from arriero.server.routes.replies import json_reply
from arriero.server.schemas import anthropic as wire
from arriero.server.services import Services, services_of
from arriero.server.stream import while_connected
from arriero.server.transcript import Delta


async def messages_route(request: Request) -> Response:
    """POST /v1/messages."""
    asked = await wire.MESSAGES.read(request)
    services = services_of(request)
    writer = MessageEvents(
        asked.model,
        show_thinking=asked.thinking is None or asked.thinking.display != "omitted",
        parallel=not asked.tool_choice.disable_parallel_tool_use,
    )
    if asked.stream:
        return _stream(request, services, asked, writer)
    return json_reply(await while_connected(request.receive, _whole(services, asked, writer)))


async def count_route(request: Request) -> Response:
    """POST /v1/messages/count_tokens: the prompt's tokens, counted without loading the model."""
    asked = await wire.COUNT.read(request)
    services = services_of(request)

    async def count() -> int:
        await _fetch_images(services, asked)
        model = await open_model(services, asked.model)
        return len(await asyncio.to_thread(lambda: unforced(prompt_of(model, asked)).whole()))

    return json_reply({"input_tokens": await while_connected(request.receive, count())})


async def _prepare(services: Services, asked: wire.MessagesRequest) -> Generation:
    if asked.max_tokens is None or asked.max_tokens < 1:
        raise InvalidRequest("max_tokens is required and must be positive")
    await _fetch_images(services, asked)
    return await prepare(
        services,
        asked.model,
        asked,
        lambda model: prompt_of(model, asked),
        form=form_of(asked),
        form_field="output_config.format",
        parallel=not asked.tool_choice.disable_parallel_tool_use,
        num_predict=asked.max_tokens,
        stop=stops_of(asked.stop_sequences, "stop_sequences"),
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        min_p=asked.min_p,
        seed=asked.seed,
    )


async def _fetch_images(services: Services, asked: wire.CountRequest) -> None:
    contents = await with_images(services, asked.model, [turn.content for turn in asked.messages])
    for turn, content in zip(asked.messages, contents, strict=True):
        turn.content = content


async def _events(
    services: Services, generation: Generation, writer: MessageEvents, prompt_tokens: int
) -> AsyncGenerator[dict[str, Any], None]:
    async with aclosing(generate(services, generation)) as items:
        async for item in items:
            for opening in writer.start(prompt_tokens):
                yield opening
            feed = writer.feed(item) if isinstance(item, Delta) else writer.end(item, generation.parameters.num_predict)
            for found in feed:
                yield found


async def _whole(services: Services, asked: wire.MessagesRequest, writer: MessageEvents) -> dict[str, Any]:
    generation = await _prepare(services, asked)
    async with aclosing(_events(services, generation, writer, 0)) as events:
        async for _ in events:
            continue
    return writer.message


def _stream(request: Request, services: Services, asked: wire.MessagesRequest, writer: MessageEvents) -> Response:
    prompt_tokens = 0

    async def pieces() -> AsyncGenerator[bytes, None]:
        nonlocal prompt_tokens
        generation = await _prepare(services, asked)
        prompt_tokens = len(await asyncio.to_thread(generation.prompt.whole))
        async with aclosing(_events(services, generation, writer, prompt_tokens)) as events:
            async for found in events:
                yield event(found, found["type"])

    def sign() -> bytes:
        opening = b"".join(event(found, found["type"]) for found in writer.start(prompt_tokens))
        return opening + event({"type": "ping"}, "ping")

    def error_piece(error: BaseException) -> bytes:
        return b"event: error\ndata: " + scoped_body(request.scope, error) + b"\n\n"

    return sse(request.scope, pieces(), error_piece=error_piece, sign=sign)


ROUTES = [
    Route("/v1/messages", messages_route, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_route, methods=["POST"]),
]
