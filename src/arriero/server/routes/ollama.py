"""`/api/generate` and `/api/chat`."""

from __future__ import annotations

import asyncio
import logging
import secrets
import string
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from arriero.chat import messages as chat
from arriero.chat.grammar import read_format
from arriero.chat.messages import Conversation
from arriero.errors import InvalidRequest
from arriero.server.completion import Final, Generation, generate, load
from arriero.server.models import OpenModel, find
from arriero.server.parameters import Parameters, settle
from arriero.server.prompts import ContinuedPrompt, ConversationPrompt, FilledPrompt, TextPrompt
from arriero.server.remote_images import fetched
from arriero.server.requests import (
    images_of,
    keep_alive_of,
    opening,
    settle_think,
    think_of,
    tools_of,
)
from arriero.server.routes.replies import json_reply
from arriero.server.schemas import ollama as wire
from arriero.server.schemas.wire import read_request
from arriero.server.services import Services, services_of
from arriero.server.stream import ndjson, while_connected
from arriero.server.transcript import Delta

log = logging.getLogger(__name__)

_ID_LETTERS = string.ascii_lowercase + string.digits


async def chat_route(request: Request) -> Response:
    """POST /api/chat."""
    asked = await read_request(request, wire.ChatRequest)
    services = services_of(request)
    if not asked.model:
        raise InvalidRequest("model is required")
    if not asked.messages or asked.debug_render_only:
        return json_reply(await while_connected(request.receive, _chat_shortcut(services, asked)))
    objects = _chat(services, asked)
    if asked.stream:
        return ndjson(objects)
    return json_reply(await while_connected(request.receive, _fold_chat(objects)))


async def generate_route(request: Request) -> Response:
    """POST /api/generate."""
    asked = await read_request(request, wire.GenerateRequest)
    services = services_of(request)
    if (not asked.prompt and not asked.suffix and not asked.images) or asked.debug_render_only:
        return json_reply(await while_connected(request.receive, _generate_shortcut(services, asked)))
    objects = _generate(services, asked)
    if asked.stream:
        return ndjson(objects)
    return json_reply(await while_connected(request.receive, _fold_generate(objects)))


# --- chat


async def _chat_shortcut(services: Services, asked: wire.ChatRequest) -> wire.ChatReply:
    """Load, unload, or only render."""
    reply = wire.ChatReply(
        model=asked.model,
        created_at=wire.timestamp(),
        message=wire.ReplyMessage(role="assistant", content=""),
        done=bool(not asked.messages),
    )
    if asked.messages:
        model = await services.models.open(services.store, asked.model)
        await _fetch_images(services, model, *asked.messages)
        prompt = await asyncio.to_thread(_chat_prompt, model, asked)
        count = sum(len(message.images) for message in asked.messages)
        reply.debug_info = wire.DebugInfo(await asyncio.to_thread(prompt.rendered), count)
    else:
        reply.done_reason = await _load_or_unload(services, asked, "chat")
    return reply


async def _chat(services: Services, asked: wire.ChatRequest) -> AsyncGenerator[wire.ChatReply, None]:
    model = await services.models.open(services.store, asked.model)
    await _fetch_images(services, model, *asked.messages)
    prompt = await asyncio.to_thread(_chat_prompt, model, asked)
    generation = Generation(
        model=model,
        prompt=prompt,
        parameters=_parameters(services, model, asked),
        keep_alive=keep_alive_of(asked.keep_alive),
        format=await asyncio.to_thread(read_format, asked.format),
        triggers=await asyncio.to_thread(prompt.strict_calls),
    )
    calls = 0
    async with aclosing(generate(services, generation)) as events:
        async for event in events:
            message = wire.ReplyMessage(role="assistant", content="")
            reply = wire.ChatReply(model=asked.model, created_at=wire.timestamp(), message=message, done=False)
            if isinstance(event, Delta):
                message.content, message.thinking = event.content, event.thinking
                message.tool_calls = [_call(call, calls + index) for index, call in enumerate(event.tool_calls)]
                calls += len(event.tool_calls)
                reply.logprobs = _logprobs(event)
            else:
                _end(reply, event)
            yield reply


def _chat_prompt(model: OpenModel, asked: wire.ChatRequest) -> ConversationPrompt:
    model.require("completion", "chat")
    tools = tools_of(model, asked.tools)
    think = settle_think(model, think_of(asked.think))
    messages = opening(model, None, [_message(model, index, message) for index, message in enumerate(asked.messages)])
    conversation = Conversation(messages=messages, tools=tools)
    return ConversationPrompt(model, conversation, think, truncate=asked.truncate)


def _message(model: OpenModel, index: int, message: wire.Message) -> chat.Message:
    if not message.role:
        raise InvalidRequest(f"messages[{index}].role is missing")
    return chat.Message(
        role=message.role.lower(),
        content=message.content,
        thinking=message.thinking,
        images=images_of(model, f"messages[{index}].images", message.images),
        tool_calls=[
            chat.ToolCall(name=call.function.name, arguments=call.function.arguments, id=call.id)
            for call in message.tool_calls
        ],
        tool_name=message.tool_name,
        tool_call_id=message.tool_call_id,
    )


async def _fold_chat(objects: AsyncGenerator[wire.ChatReply, None]) -> wire.ChatReply:
    """The whole reply: texts, calls and log-probabilities of all objects in order, the rest from the last one."""
    whole = wire.ReplyMessage(role="assistant", content="")
    logprobs: list[wire.Logprob] = []
    async with aclosing(objects):
        async for reply in objects:
            whole.content += reply.message.content
            whole.thinking += reply.message.thinking
            whole.tool_calls = whole.tool_calls + reply.message.tool_calls
            logprobs += reply.logprobs
    reply.message, reply.logprobs = whole, logprobs
    return reply


# --- generate


async def _generate_shortcut(services: Services, asked: wire.GenerateRequest) -> wire.GenerateReply:
    """Load, unload, or only render."""
    reply = wire.GenerateReply(model=asked.model, created_at=wire.timestamp(), response="", done=True)
    if asked.debug_render_only and asked.prompt:
        model = await services.models.open(services.store, asked.model)
        await _fetch_images(services, model, asked)
        prompt = await asyncio.to_thread(_generate_prompt, model, asked)
        reply.debug_info = wire.DebugInfo(await asyncio.to_thread(prompt.rendered), len(asked.images))
        reply.done = False
    else:
        reply.done_reason = await _load_or_unload(services, asked, "generate")
    return reply


async def _generate(services: Services, asked: wire.GenerateRequest) -> AsyncGenerator[wire.GenerateReply, None]:
    model = await services.models.open(services.store, asked.model)
    await _fetch_images(services, model, asked)
    generation = Generation(
        model=model,
        prompt=await asyncio.to_thread(_generate_prompt, model, asked),
        parameters=_parameters(services, model, asked),
        keep_alive=keep_alive_of(asked.keep_alive),
        format=await asyncio.to_thread(read_format, asked.format),
    )
    calls = 0
    async with aclosing(generate(services, generation)) as events:
        async for event in events:
            reply = wire.GenerateReply(model=asked.model, created_at=wire.timestamp(), response="", done=False)
            if isinstance(event, Delta):
                reply.response, reply.thinking = event.content, event.thinking
                reply.tool_calls = [_call(call, calls + index) for index, call in enumerate(event.tool_calls)]
                calls += len(event.tool_calls)
                reply.logprobs = _logprobs(event)
            else:
                _end(reply, event)
                reply.context = [] if asked.raw else event.prompt.tokens + event.tokens
            yield reply


def _generate_prompt(
    model: OpenModel, asked: wire.GenerateRequest
) -> ConversationPrompt | ContinuedPrompt | FilledPrompt | TextPrompt:
    model.require("completion", "generate")
    think = settle_think(model, think_of(asked.think))
    images = images_of(model, "images", asked.images)
    if asked.raw:
        if asked.template or asked.system or asked.context:
            raise InvalidRequest("raw mode does not support template, system, or context")
        return TextPrompt(model, asked.prompt, images)
    if asked.suffix:
        model.require("insert")
        if asked.template or asked.system or asked.context:
            raise InvalidRequest("a suffix does not go with template, system, or context")
        if images:
            raise InvalidRequest("a suffix does not go with images")
        return FilledPrompt(model, asked.prompt, asked.suffix)
    question = chat.Message(role="user", content=asked.prompt, images=images)
    # A context holds the model's own system prompt and messages already.
    messages = opening(model, asked.system or "" if asked.context else asked.system, [question], not asked.context)
    prompt = ConversationPrompt(
        model, Conversation(messages=messages), think, truncate=False, template=asked.template or None
    )
    return ContinuedPrompt(model, asked.context, prompt, truncate=asked.truncate) if asked.context else prompt


async def _fold_generate(objects: AsyncGenerator[wire.GenerateReply, None]) -> wire.GenerateReply:
    """As `_fold_chat`."""
    response, thinking = "", ""
    calls: list[wire.ToolCall] = []
    logprobs: list[wire.Logprob] = []
    async with aclosing(objects):
        async for reply in objects:
            response += reply.response
            thinking += reply.thinking
            calls += reply.tool_calls
            logprobs += reply.logprobs
    reply.response, reply.thinking, reply.tool_calls, reply.logprobs = response, thinking, calls, logprobs
    return reply


# --- both


async def _fetch_images(services: Services, model: OpenModel, *asked: wire.Message | wire.GenerateRequest) -> None:
    """Put images in the place of their addresses, where the server fetches them."""
    found = await fetched(services, model, [image for holder in asked for image in holder.images])
    for holder in asked:
        holder.images = [found.get(image, image) for image in holder.images]


async def _load_or_unload(services: Services, asked: wire.GenerationFields, what: str) -> str:
    """Do what an empty prompt asks for; the `done_reason`."""
    keep_alive = keep_alive_of(asked.keep_alive)
    if keep_alive == 0:
        # By name alone: a model whose files have gone can still be told to go.
        stored = await asyncio.to_thread(find, services.store, asked.model)
        # Shielded: a client that leaves meanwhile must not leave a half-stopped runner behind.
        await asyncio.shield(services.scheduler.unload(stored.digest))
        return "unload"
    model = await services.models.open(services.store, asked.model)
    model.require("completion", what)
    await load(services, model, _parameters(services, model, asked).num_ctx, keep_alive)
    return "load"


def _parameters(services: Services, model: OpenModel, asked: wire.GenerationFields) -> Parameters:
    return settle(
        services.settings,
        model.stored.params,
        asked.options,
        logprobs=asked.logprobs,
        top_logprobs=asked.top_logprobs,
    )


def _end(reply: wire.ChatReply | wire.GenerateReply, final: Final) -> None:
    """Fill in the last object."""
    reply.done, reply.done_reason = True, "repetition" if final.looped else final.reason
    reply.total_duration, reply.load_duration = final.total_ns, final.load_ns
    reply.prompt_eval_count, reply.prompt_eval_duration = len(final.prompt), final.prefill_ns
    reply.prompt_cached_count = final.cached_tokens
    reply.eval_count, reply.eval_duration = final.generated_tokens, final.decode_ns
    used = final.speculation
    if used is not None and used.rounds:
        reply.drafting = wire.Drafted(used.kind, used.rounds, used.drafted, used.accepted, used.plain_steps)
    if final.prompt.dropped_messages or final.prompt.dropped_tokens:
        reply.truncated = wire.Truncated(final.prompt.dropped_messages, final.prompt.dropped_tokens)


def _call(call: chat.ToolCall, index: int) -> wire.ToolCall:
    arguments = call.mapping()
    return wire.ToolCall(
        id=call.id or "call_" + "".join(secrets.choice(_ID_LETTERS) for _ in range(8)),
        function=wire.ToolFunction(
            index=index, name=call.name, arguments={"arguments": call.text()} if arguments is None else arguments
        ),
    )


def _logprobs(delta: Delta) -> list[wire.Logprob]:
    def shown(data: bytes) -> dict[str, Any]:
        return {"token": data.decode("utf-8", "replace"), "bytes": list(data)}

    return [
        wire.Logprob(
            logprob=item.chosen.logprob,
            top_logprobs=[wire.TopLogprob(logprob=one.logprob, **shown(one.data)) for one in item.top],
            **shown(item.chosen.data),
        )
        for item in delta.logprobs
    ]


ROUTES = [
    Route("/api/generate", generate_route, methods=["POST"]),
    Route("/api/chat", chat_route, methods=["POST"]),
]
