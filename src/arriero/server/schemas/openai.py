"""Wire types of OpenAI's chat completions, completions, embeddings and models, and what becomes of every field."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from arriero.server.compat.fields import FieldRules, Refusal
from arriero.server.schemas.extensions import Extensions


class CalledFunction(msgspec.Struct, kw_only=True):
    """The function of a call in the history."""

    name: str = ""
    arguments: dict[str, Any] | str = {}


class CalledCustom(msgspec.Struct, kw_only=True):
    """The free-form tool of a call in the history."""

    name: str = ""
    input: str = ""


class PastCall(msgspec.Struct, kw_only=True):
    """A tool call in the history."""

    id: str = ""
    function: CalledFunction | None = None
    custom: CalledCustom | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    """A message of the history; `content` is a text, a list of parts or null."""

    role: str = ""
    content: Any = None
    name: str = ""
    """Of a tool's result: the function. Of others: who speaks, which templates have no place for."""
    reasoning_content: str = ""
    reasoning: Any = None
    thinking: str = ""
    refusal: str = ""
    tool_calls: list[PastCall] = []
    function_call: CalledFunction | None = None
    tool_call_id: str = ""


class StreamOptions(msgspec.Struct, kw_only=True):
    """How to stream."""

    include_usage: bool = False


class SampledRequest(Extensions, kw_only=True):
    """What both kinds of completions take."""

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions = msgspec.field(default_factory=StreamOptions)
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    stop: Any = None


class ChatRequest(SampledRequest, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = msgspec.field(default_factory=list)
    max_completion_tokens: int | None = None
    response_format: Any = None
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    reasoning_effort: Any = None
    reasoning: Any = None
    think: Any = None
    logprobs: bool = False
    top_logprobs: int | None = None


class CompletionRequest(SampledRequest, kw_only=True):
    """POST /v1/completions."""

    prompt: Any = None
    suffix: str = ""
    raw: bool = False
    """The prompt is taken as it is, without the model's template (ours)."""
    logprobs: int | None = None


class EmbeddingsRequest(Extensions, kw_only=True):
    """POST /v1/embeddings."""

    model: str = ""
    input: Any = None
    dimensions: int | None = None
    encoding_format: str = "float"


_ONE = Refusal("one reply is made for each request; send the request again for another", (1,))
_BIAS = Refusal("tokens can't be biased here", ({},))
_SERVICE = "a matter of the hosted service"

CHAT = FieldRules(
    "/v1/chat/completions",
    ChatRequest,
    ignored={
        "user": _SERVICE,
        "metadata": _SERVICE,
        "store": "replies are not kept; /v1/responses keeps them",
        "service_tier": _SERVICE,
        "safety_identifier": _SERVICE,
        "prompt_cache_key": "prefixes are found by their tokens",
        "prompt_cache_options": "prefixes are found by their tokens",
        "prompt_cache_retention": "prefixes are kept as memory allows",
        "prediction": "a help for speed that changes no reply",
        "verbosity": "a hint that local models don't know",
        "stream_options.include_obfuscation": "a defence of traffic over networks",
    },
    refused={
        "n": _ONE,
        "logit_bias": _BIAS,
        "audio": Refusal("replies are text"),
        "modalities": Refusal("replies are text", (["text"],)),
        "moderation": Refusal("nothing is moderated here"),
        "web_search_options": Refusal("this server doesn't search the web"),
        "functions": Refusal("use tools", ([],)),
        "function_call": Refusal("use tools and tool_choice", ("auto", "none")),
    },
)

COMPLETION = FieldRules(
    "/v1/completions",
    CompletionRequest,
    ignored={"user": _SERVICE, "stream_options.include_obfuscation": "a defence of traffic over networks"},
    refused={
        "n": _ONE,
        "best_of": _ONE,
        "echo": Refusal("the reply holds new text only", (False,)),
        "logit_bias": _BIAS,
    },
)


EMBEDDINGS = FieldRules("/v1/embeddings", EmbeddingsRequest, ignored={"user": _SERVICE}, refused={})


class PromptDetails(msgspec.Struct, kw_only=True):
    """Of the prompt's tokens, those that were not computed again."""

    cached_tokens: int


class CompletionDetails(msgspec.Struct, kw_only=True):
    """Of the reply's tokens, those that thoughts took."""

    reasoning_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    """What a reply took, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails
    truncated: dict[str, int] | UnsetType = UNSET
    """How many messages were left out (ours)."""


class TopLogprob(msgspec.Struct, kw_only=True):
    """A token, its log-probability and its exact bytes."""

    token: str
    logprob: float
    bytes: list[int]


class Logprob(TopLogprob, kw_only=True):
    """A generated token and the likeliest at its place."""

    top_logprobs: list[TopLogprob] = []


class Logprobs(msgspec.Struct, kw_only=True):
    """Of a choice, or of a piece of one."""

    content: list[Logprob]
    refusal: None = None


class Function(msgspec.Struct, kw_only=True):
    """A call's function; `arguments` is JSON text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    """One call of a reply, whole."""

    index: int
    id: str
    type: Literal["function"] = "function"
    function: Function


class ReplyMessage(msgspec.Struct, kw_only=True):
    """The assistant's message, or a piece of it: then only what the piece has is there."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    refusal: UnsetType | None = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    """The same again: clients look for the one or the other name."""
    tool_calls: list[ToolCall] | UnsetType = UNSET


FinishReason = Literal["stop", "length", "tool_calls"]


class Choice(msgspec.Struct, kw_only=True):
    """The reply; `delta` in a stream, `message` otherwise."""

    index: int = 0
    message: ReplyMessage | UnsetType = UNSET
    delta: ReplyMessage | UnsetType = UNSET
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None


class ChatReply(msgspec.Struct, kw_only=True):
    """A whole reply, or an event of a stream (`chat.completion.chunk`)."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str = "fp_arriero"
    choices: list[Choice]
    usage: Usage | UnsetType | None = UNSET


class TextLogprobs(msgspec.Struct, kw_only=True):
    """The older form of log-probabilities."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(msgspec.Struct, kw_only=True):
    """The text, or a piece of it."""

    text: str
    index: int = 0
    logprobs: TextLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None


class TextReply(msgspec.Struct, kw_only=True):
    """A whole reply, or an event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str = "fp_arriero"
    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET
