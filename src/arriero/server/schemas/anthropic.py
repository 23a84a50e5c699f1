"""Wire types of Anthropic's messages, and what becomes of every field."""

from __future__ import annotations

from typing import Any

import msgspec

from arriero.server.compat.fields import FieldRules, Refusal
from arriero.server.schemas.extensions import Extensions


class Turn(msgspec.Struct, kw_only=True):
    """A message of the history: a text, or blocks."""

    role: str = ""
    content: Any = None


class Thinking(msgspec.Struct, kw_only=True):
    """Whether to think, and whether to show it."""

    type: str = ""
    display: str = "summarized"


class OutputConfig(msgspec.Struct, kw_only=True):
    """How hard to think, and the form of the answer."""

    effort: Any = None
    format: Any = None


class ToolChoice(msgspec.Struct, kw_only=True):
    """Whether tools may or must be called."""

    type: str = "auto"
    name: str = ""
    disable_parallel_tool_use: bool = False


class CountRequest(Extensions, kw_only=True):
    """POST /v1/messages/count_tokens: what makes the prompt."""

    model: str = ""
    messages: list[Turn] = msgspec.field(default_factory=list)
    system: Any = None
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)
    tool_choice: ToolChoice = msgspec.field(default_factory=ToolChoice)
    thinking: Thinking | None = None
    output_config: OutputConfig = msgspec.field(default_factory=OutputConfig)


class MessagesRequest(CountRequest, kw_only=True):
    """POST /v1/messages."""

    max_tokens: int | None = None
    stream: bool = False
    stop_sequences: Any = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None


_SERVICE = "a matter of the hosted service"
_IGNORED = {
    "cache_control": "prefixes are found by their tokens, without marks",
    "speed": _SERVICE,
    "user_profile_id": _SERVICE,
    "workspace_id": _SERVICE,
    "betas": "a header of the client",
    "billing_policy": _SERVICE,
    "compaction": "the history is taken whole; a prompt that doesn't fit is an error",
    "context_management": "the history is taken whole",
    "output_config.task_budget": "a hint that local models don't know",
    "thinking.budget_tokens": "thinking has no limit of its own here",
}
_REFUSED = {"mcp_servers": Refusal("this server calls no others", ([],))}

MESSAGES = FieldRules(
    "/v1/messages",
    MessagesRequest,
    ignored={
        **_IGNORED,
        "metadata": _SERVICE,
        "service_tier": _SERVICE,
        "inference_geo": "nothing leaves this machine",
        "diagnostics": _SERVICE,
        "fallback_credit_token": _SERVICE,
        "fallbacks": "the model that is asked for answers",
    },
    refused={
        **_REFUSED,
        "container": Refusal("this server runs no code"),
        "thread": Refusal("conversations are not kept: send all messages"),
    },
)

COUNT = FieldRules("/v1/messages/count_tokens", CountRequest, ignored=_IGNORED, refused=_REFUSED)
