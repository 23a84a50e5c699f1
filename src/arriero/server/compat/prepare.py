"""From a translated request to a generation: the checks and defaults that all /v1 routes share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from arriero.chat.grammar import Format, read_format
from arriero.chat.messages import Conversation, Message, Think, Tool
from arriero.errors import InvalidRequest
from arriero.runner.messages import Trigger
from arriero.server.compat.fields import warn_once
from arriero.server.completion import Generation, PromptMaker
from arriero.server.models import OpenModel
from arriero.server.parameters import settle
from arriero.server.prompts import ConversationPrompt
from arriero.server.requests import keep_alive_of, opening
from arriero.server.schemas.extensions import Extensions
from arriero.server.services import Services

_EFFORTS: dict[str, Think] = {
    "none": False,
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "max",
    "ultra": "max",
    "max": "max",
}


def think_of_effort(value: Any, where: str) -> Think:
    """A word for the effort of reasoning, in any case; true and false are taken too, null leaves it to the model."""
    if value is None or isinstance(value, bool):
        return value
    think = _EFFORTS.get(value.strip().lower()) if isinstance(value, str) else None
    if think is None:
        words = ", ".join(f'"{word}"' for word in _EFFORTS)
        raise InvalidRequest(f"{where} must be one of {words}; it is {value!r:.60}")
    return think


def think_for(model: OpenModel, think: Think) -> Think:
    """What that means for a model. These clients send an effort to every model: one that can't think ignores it."""
    if model.can("thinking"):
        return True if think is None else think
    if think:
        warn_once(model.asked[:80], "the model can't think, so the effort of reasoning has no effect")
    return None


def conversation_prompt(
    model: OpenModel,
    messages: Sequence[Message],
    *,
    tools: Sequence[Tool] = (),
    think: Think = None,
    system: str | None = None,
    truncate: bool = False,
) -> ConversationPrompt:
    """The prompt of a conversation, with the model's own system prompt and messages in front as on the native route."""
    model.require("completion", "chat")
    conversation = Conversation(messages=opening(model, system, messages), tools=list(tools))
    return ConversationPrompt(model, conversation, think_for(model, think), truncate=truncate)


async def prepare(
    services: Services,
    name: str,
    asked: Extensions,
    make: Callable[[OpenModel], PromptMaker | ForcedCall],
    *,
    logprobs: bool = False,
    top_logprobs: int = 0,
    form: Any = None,
    form_field: str = "format",
    parallel: bool = True,
    **options: Any,
) -> Generation:
    """The generation that a request asks for; `form` is the native API's `format`, by the name that errors give it.

    `options` are the API's own fields under our names, None = not given. `parallel` is whether a reply that must be a
    call may hold several.

    Raises what opening the model, `make` and the options raise.
    """
    model = await open_model(services, name)
    given = {key: value for key, value in options.items() if value is not None}
    window = {} if asked.num_ctx is None else {"num_ctx": asked.num_ctx}
    parameters = settle(
        services.settings,
        model.stored.params,
        asked.options | window | given,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
    )
    made = await asyncio.to_thread(make, model)
    wanted = await asyncio.to_thread(read_format, form, form_field)
    triggers: Sequence[Trigger] = ()
    if isinstance(made, ForcedCall):
        # A reply that must be a call has no content that could have another form.
        wanted = await asyncio.to_thread(made.format, parallel)
        made = made.prompt
    elif isinstance(made, ConversationPrompt):
        triggers = await asyncio.to_thread(made.strict_calls)
    return Generation(
        model=model,
        prompt=made,
        parameters=parameters,
        keep_alive=keep_alive_of(asked.keep_alive),
        format=wanted,
        triggers=triggers,
    )


async def open_model(services: Services, name: str) -> OpenModel:
    """The model of a request; InvalidRequest when it names none."""
    if not name:
        raise InvalidRequest("model is required")
    return await services.models.open(services.store, name)


def token_limit(value: int | None, where: str) -> int | None:
    """A limit on new tokens; −1 is none at all, as some clients say it."""
    if value is None or value == -1 or value > 0:
        return value
    raise InvalidRequest(f"{where} must be at least 1 (or -1 for no limit); it is {value}")


def stops_of(value: Any, where: str) -> list[str] | None:
    """Stop strings, from one text or a list of texts."""
    if value is None:
        return None
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(f"{where} must be a string or a list of strings")
    return texts


@dataclass(frozen=True, slots=True)
class Offer:
    """The tools that a model is shown, and those of which it must call one; none = it may do as it likes."""

    tools: list[Tool]
    forced: tuple[Tool, ...] = ()

    def force(self, name: str | None, where: str) -> Offer:
        """The same with a call of any tool, or of the one with a name; InvalidRequest when there is none."""
        forced = tuple(tool for tool in self.tools if name is None or tool.name == name)
        if not forced:
            wanted = "a call needs tools" if name is None else f"there is no function '{name[:80]}' among the tools"
            raise InvalidRequest(f"{where}: {wanted}")
        return Offer(self.tools, forced)


@dataclass(frozen=True, slots=True)
class ForcedCall:
    """A prompt that must be answered by a call of one of some tools."""

    prompt: ConversationPrompt
    tools: tuple[Tool, ...]

    def format(self, parallel: bool) -> Format:
        """What the reply must be; may take a fraction of a second."""
        return self.prompt.call_format(self.tools, many=parallel)


def offer_prompt(
    model: OpenModel,
    messages: Sequence[Message],
    offer: Offer,
    *,
    think: Think = None,
    system: str | None = None,
    truncate: bool = False,
) -> ConversationPrompt | ForcedCall:
    """As `conversation_prompt`, with tools."""
    prompt = conversation_prompt(model, messages, tools=offer.tools, think=think, system=system, truncate=truncate)
    return ForcedCall(prompt, offer.forced) if offer.forced else prompt


def unforced(made: PromptMaker | ForcedCall) -> PromptMaker:
    """The prompt alone."""
    return made.prompt if isinstance(made, ForcedCall) else made
