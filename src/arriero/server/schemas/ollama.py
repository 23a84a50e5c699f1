"""Wire types of the native API. Field names, defaults and presence are the protocol's; nothing here computes."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from arriero.create import request as create


class CalledFunction(msgspec.Struct, kw_only=True):
    """The function of a call in a request's history."""

    name: str = ""
    arguments: dict[str, Any] | str = {}
    """An object; the text of one, OpenAI's form, is taken too."""


class PastCall(msgspec.Struct, kw_only=True):
    """A tool call in a request's history."""

    function: CalledFunction = msgspec.field(default_factory=CalledFunction)
    id: str = ""


class Message(msgspec.Struct, kw_only=True):
    """A message of a chat request."""

    role: str = ""
    content: str = ""
    thinking: str = ""
    images: list[str] = []
    tool_calls: list[PastCall] = []
    tool_name: str = ""
    tool_call_id: str = ""


class GenerationFields(msgspec.Struct, kw_only=True):
    """What generate and chat requests have in common. `Any` fields are checked where their rules live."""

    model: str = ""
    stream: bool = True
    format: Any = None
    keep_alive: Any = None
    options: dict[str, Any] = {}
    think: Any = None
    truncate: bool = True
    shift: bool = True
    logprobs: bool = False
    top_logprobs: int = 0
    debug_render_only: bool = msgspec.field(default=False, name="_debug_render_only")


class GenerateRequest(GenerationFields, kw_only=True):
    """POST /api/generate."""

    prompt: str = ""
    suffix: str = ""
    system: str | None = None
    template: str | None = None
    context: list[int] = []
    raw: bool = False
    images: list[str] = []


class ChatRequest(GenerationFields, kw_only=True):
    """POST /api/chat."""

    messages: list[Message] = []
    tools: list[dict[str, Any]] = []


class ModelRequest(msgspec.Struct, kw_only=True):
    """A request that names one model, by `model` or the older `name` (show, delete, pull, push)."""

    model: str = ""
    name: str = ""
    stream: bool = True
    insecure: bool = False
    verbose: bool = False
    system: str | None = None
    options: dict[str, Any] = {}

    @property
    def wanted(self) -> str:
        """The model's name, whichever field carried it."""
        return self.model or self.name


class VerifyRequest(ModelRequest, kw_only=True):
    """POST /api/verify: of one model, or of everything that is stored."""

    repair: bool = False


class CopyRequest(msgspec.Struct, kw_only=True):
    """POST /api/copy."""

    source: str = ""
    destination: str = ""


class CreateRequest(create.CreateRequest, kw_only=True):
    """POST /api/create: what `create` takes, and how to answer."""

    stream: bool = True


# --- replies


class ToolFunction(msgspec.Struct, kw_only=True):
    """A call's function; `arguments` is an object whose key order is kept."""

    index: int
    """Counts the calls of one reply from 0."""
    name: str
    arguments: dict[str, Any]


class ToolCall(msgspec.Struct, kw_only=True):
    """One tool call of a reply."""

    id: str
    function: ToolFunction


class TopLogprob(msgspec.Struct, omit_defaults=True):
    """A token, its log-probability and its exact bytes."""

    token: str
    logprob: float
    bytes: list[int] = []


class Logprob(TopLogprob, omit_defaults=True):
    """A generated token and the likeliest alternatives at its place."""

    top_logprobs: list[TopLogprob] = []


class ReplyMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The assistant's message, or a piece of it."""

    role: str
    content: str
    thinking: str = ""
    tool_calls: list[ToolCall] = []


class Truncated(msgspec.Struct, omit_defaults=True):
    """What was left out to make a prompt fit (ours; clients that don't know the field ignore it)."""

    dropped_messages: int = 0
    dropped_tokens: int = 0


class DebugInfo(msgspec.Struct, omit_defaults=True):
    """The rendered prompt, when a client asked for nothing else."""

    rendered_template: str
    image_count: int = 0


class Drafted(msgspec.Struct, omit_defaults=True):
    """What speculation did for a reply (ours): of `drafted` tokens `accepted` stayed, in `rounds` forwards."""

    kind: str
    rounds: int
    drafted: int
    accepted: int
    plain_steps: int = 0


class ChatReply(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One object of a chat reply, streamed or whole. Durations are nanoseconds; what is zero is left out."""

    model: str
    created_at: str
    message: ReplyMessage
    done: bool
    done_reason: str = ""
    logprobs: list[Logprob] = []
    total_duration: int = 0
    load_duration: int = 0
    prompt_eval_count: int = 0
    prompt_eval_duration: int = 0
    prompt_cached_count: int = 0
    """Prompt tokens that were not computed again (ours; included in `prompt_eval_count`)."""
    eval_count: int = 0
    eval_duration: int = 0
    drafting: Drafted | None = None
    """Only where something was drafted."""
    truncated: Truncated | None = None
    debug_info: DebugInfo | None = msgspec.field(default=None, name="_debug_info")


class GenerateReply(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One object of a generate reply, streamed or whole. Durations are nanoseconds; what is zero is left out."""

    model: str
    created_at: str
    response: str
    done: bool
    thinking: str = ""
    done_reason: str = ""
    context: list[int] = []
    tool_calls: list[ToolCall] = []
    logprobs: list[Logprob] = []
    total_duration: int = 0
    load_duration: int = 0
    prompt_eval_count: int = 0
    prompt_eval_duration: int = 0
    prompt_cached_count: int = 0
    """Prompt tokens that were not computed again (ours; included in `prompt_eval_count`)."""
    eval_count: int = 0
    eval_duration: int = 0
    drafting: Drafted | None = None
    """Only where something was drafted."""
    truncated: Truncated | None = None
    debug_info: DebugInfo | None = msgspec.field(default=None, name="_debug_info")


def timestamp(nanoseconds: int | None = None) -> str:
    """RFC 3339 in UTC with nine fractional digits and `Z`; default now."""
    seconds, rest = divmod(time.time_ns() if nanoseconds is None else nanoseconds, 1_000_000_000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{rest:09d}Z"


def local_timestamp(seconds: float) -> str:
    """RFC 3339 with the machine's offset, as `modified_at` and `expires_at` carry it."""
    whole, rest = divmod(round(seconds * 1e9), 1_000_000_000)
    moment = time.localtime(whole)
    offset = time.strftime("%z", moment)
    zone = "Z" if moment.tm_gmtoff == 0 else f"{offset[:3]}:{offset[3:5]}"
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', moment)}.{rest:09d}{zone}"
