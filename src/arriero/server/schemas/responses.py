"""Wire types of OpenAI's responses, and what becomes of every field."""

from __future__ import annotations

from typing import Any

import msgspec

from arriero.server.compat.fields import FieldRules, Refusal
from arriero.server.schemas.extensions import Extensions


class Reasoning(msgspec.Struct, kw_only=True):
    """How hard to think; `summary` is echoed, thoughts are never shortened."""

    effort: Any = None
    summary: str | None = None


class Text(msgspec.Struct, kw_only=True):
    """The form of the answer."""

    format: Any = None


class ResponseRequest(Extensions, kw_only=True):
    """POST /v1/responses."""

    model: str = ""
    input: Any = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    stream: bool = False
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    reasoning: Reasoning = msgspec.field(default_factory=Reasoning)
    text: Text = msgspec.field(default_factory=Text)
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    truncation: str = "disabled"
    include: list[str] = msgspec.field(default_factory=list)
    top_logprobs: int | None = None
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)


INCLUDES = (
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
"""What `include` may hold. All but the first two concern things that no reply here has."""

_SERVICE = "a matter of the hosted service"

RESPONSES = FieldRules(
    "/v1/responses",
    ResponseRequest,
    ignored={
        "user": _SERVICE,
        "service_tier": _SERVICE,
        "safety_identifier": _SERVICE,
        "access_programs": _SERVICE,
        "client_metadata": _SERVICE,
        "prompt_cache_key": "prefixes are found by their tokens",
        "prompt_cache_options": "prefixes are found by their tokens",
        "prompt_cache_retention": "prefixes are kept as memory allows",
        "max_tool_calls": "a limit on tools that the hosted service runs",
        "context_management": "the history is taken whole",
        "background_options": "background is refused",
        "stream_options": "a defence of traffic over networks",
        "image": "how the hosted service makes images",
        "text.verbosity": "a hint that local models don't know",
        "reasoning.generate_summary": "the older name of summary",
        "reasoning.context": "all thoughts of the input are shown to the model's template",
        "reasoning.mode": _SERVICE,
    },
    refused={
        "background": Refusal("replies are made while the client waits", (False,)),
        "conversation": Refusal("use previous_response_id, or send all items as input"),
        "moderation": Refusal("nothing is moderated here"),
        "prompt": Refusal("there are no stored prompts: send instructions and input"),
    },
)
