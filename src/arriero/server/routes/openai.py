"""`/v1/chat/completions` and `/v1/completions`: OpenAI's."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from arriero.chat.messages import Message
from arriero.errors import InvalidRequest, UnsupportedFeature
from arriero.server.compat.openai_request import format_of, messages_of, offer_of, think_of_request
from arriero.server.compat.openai_writer import ChatChunks, TextChunks, whole_chat, whole_text
from arriero.server.compat.prepare import (
    ForcedCall,
    conversation_prompt,
    offer_prompt,
    prepare,
    stops_of,
    token_limit,
)
from arriero.server.compat.sse import DONE, event, sse
from arriero.server.compat.token_prompt import TokenPrompt
from arriero.server.completion import Generation, PromptMaker, generate
from arriero.server.errors import scoped_body
from arriero.server.models import OpenModel
from arriero.server.prompts import FilledPrompt, TextPrompt
from arriero.server.remote_images import with_images
from arriero.server.routes.replies import json_reply
from arriero.server.schemas import openai as wire
from arriero.server.services import Services, services_of
from arriero.server.stream import while_connected
from arriero.server.transcript import Delta


async def chat_route(request: Request) -> Response:
    """POST /v1/chat/completions."""
    asked = await wire.CHAT.read(request)
    services = services_of(request)
    if asked.top_logprobs and not asked.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true")
    if asked.stream:
        usage = asked.stream_options.include_usage
        return _stream(request, _chat(services, asked, usage=usage))
    whole = _collect(_chat(services, asked, usage=True))
    return json_reply(whole_chat(await while_connected(request.receive, whole)))


async def completion_route(request: Request) -> Response:
    """POST /v1/completions."""
    asked = await wire.COMPLETION.read(request)
    services = services_of(request)
    if asked.stream:
        return _stream(request, _completion(services, asked, usage=asked.stream_options.include_usage))
    whole = _collect(_completion(services, asked, usage=True))
    return json_reply(whole_text(await while_connected(request.receive, whole)))


async def _chat(services: Services, asked: wire.ChatRequest, *, usage: bool) -> AsyncGenerator[wire.ChatReply, None]:
    form = format_of(asked.response_format, "response_format")
    contents = await with_images(services, asked.model, [message.content for message in asked.messages])
    for message, content in zip(asked.messages, contents, strict=True):
        message.content = content

    def make(model: OpenModel) -> PromptMaker | ForcedCall:
        return offer_prompt(
            model,
            messages_of(model, asked.messages),
            offer_of(model, asked.tools, asked.tool_choice),
            think=think_of_request(asked),
            truncate=asked.truncate,
        )

    limit = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
    generation = await prepare(
        services,
        asked.model,
        asked,
        make,
        logprobs=asked.logprobs,
        top_logprobs=asked.top_logprobs or 0,
        form=form,
        form_field="response_format",
        parallel=asked.parallel_tool_calls,
        num_predict=token_limit(
            limit, "max_tokens" if asked.max_completion_tokens is None else "max_completion_tokens"
        ),
        **_sampling(asked),
    )
    chunks = ChatChunks(asked.model, usage=usage, logprobs=asked.logprobs, parallel=asked.parallel_tool_calls)
    async with aclosing(_written(services, generation, chunks)) as replies:
        async for reply in replies:
            yield reply


async def _completion(
    services: Services, asked: wire.CompletionRequest, *, usage: bool
) -> AsyncGenerator[wire.TextReply, None]:
    prompt = _prompt_of(asked.prompt)

    def make(model: OpenModel) -> PromptMaker:
        model.require("completion", "completions")
        if asked.suffix:
            model.require("insert")
            if isinstance(prompt, list):
                raise InvalidRequest("a suffix needs a prompt of text")
            return FilledPrompt(model, prompt, asked.suffix)
        if isinstance(prompt, list):
            return TokenPrompt(model, prompt)
        if asked.raw:
            return TextPrompt(model, prompt)
        # The reply has no place for thoughts.
        return conversation_prompt(model, [Message(role="user", content=prompt)], think=False, truncate=asked.truncate)

    generation = await prepare(
        services,
        asked.model,
        asked,
        make,
        logprobs=asked.logprobs is not None,
        top_logprobs=asked.logprobs or 0,
        num_predict=token_limit(asked.max_tokens, "max_tokens"),
        **_sampling(asked),
    )
    chunks = TextChunks(asked.model, usage=usage, logprobs=asked.logprobs is not None)
    async with aclosing(_written(services, generation, chunks)) as replies:
        async for reply in replies:
            yield reply


async def _written(
    services: Services, generation: Generation, chunks: ChatChunks | TextChunks
) -> AsyncGenerator[Any, None]:
    async with aclosing(generate(services, generation)) as events:
        async for item in events:
            for reply in chunks.feed(item) if isinstance(item, Delta) else chunks.end(item):
                yield reply


def _sampling(asked: wire.ChatRequest | wire.CompletionRequest) -> dict[str, Any]:
    names = ("temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty")
    return {name: getattr(asked, name) for name in names} | {"stop": stops_of(asked.stop, "stop")}


def _prompt_of(value: Any) -> str | list[int]:
    """One prompt, as text or as tokens, alone or in a list."""
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise UnsupportedFeature(f"prompt holds {len(value)} prompts: send a request for each of them")
        value = value[0]
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return value
    raise InvalidRequest("prompt must be a string or a list of tokens")


async def _collect(replies: AsyncGenerator[Any, None]) -> list[Any]:
    async with aclosing(replies):
        return [reply async for reply in replies]


def _stream(request: Request, replies: AsyncGenerator[Any, None]) -> Response:
    async def pieces() -> AsyncGenerator[bytes, None]:
        async with aclosing(replies):
            async for reply in replies:
                yield event(reply)
        yield DONE

    scope = request.scope
    return sse(scope, pieces(), error_piece=lambda error: b"data: " + scoped_body(scope, error) + b"\n\n")


ROUTES = [
    Route("/v1/chat/completions", chat_route, methods=["POST"]),
    Route("/v1/completions", completion_route, methods=["POST"]),
]
