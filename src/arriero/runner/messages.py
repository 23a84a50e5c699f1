"""What the server process and a runner process say to each other: one msgpack message a frame.

A runner is started with `RunnerConfig` as JSON, as its argument or (argument `-`) on standard input. It sends `Loading`
until `Ready` or `LoadFailed`. A row answers `PrefillProgress` and `Tokens` and ends with `Finished` or `Failed`.

Token ids only; refuses to know text, HTTP and MLX (the server process imports this).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from arriero.image import PlacedImage
from arriero.source import ModelSource


class SamplingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a row's next token is drawn; meanings and order as in `runner/sampling`."""

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.9
    min_p: float = 0.0
    typical_p: float = 1.0
    repeat_last_n: int = 64
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = -1
    """Negative = random."""
    logprobs: bool = False
    top_logprobs: int = 0


class RunnerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a runner process is started with (JSON on its command line)."""

    source: ModelSource
    endpoint: str
    """Address of the socket that the server listens on (`ipc://…`)."""
    context_length: int = 0
    """Most tokens of one row; 0 = the model's own limit."""
    max_rows: int = 0
    """Most rows decoded at once; 0 = decided by the engine."""
    prefill_chunk: int = 0
    """Prompt tokens in one forward; 0 = decided by the device."""
    prefix_bytes: int = -1
    """Bytes that stored prefixes may take; 0 = nothing is stored, -1 = decided from memory."""
    prefix_folder: str = ""
    """Folder where stored prefixes outlive the process; '' = they don't."""
    prefix_folder_bytes: int = 0
    """Bytes that this folder may hold."""
    dtype: str = ""
    """Activation dtype; '' = the checkpoint's."""
    prefill: str = ""
    """How products of many tokens are computed: '' or 'exact', or 'int8'."""
    speculation: str = ""
    """What drafts: '' or 'auto' (the model's draft, else its own text), 'off', 'lookup' (its own text), 'draft'."""
    draft_tokens: int = 0
    """Most tokens drafted in a round; 0 = decided by the draft."""
    draft: ModelSource | None = None
    """The draft of another checkpoint; None = what the model's own holds, if any."""
    memory_limit: int = 0
    """Bytes that weights, caches and scratch may take together; 0 = no limit."""
    log_level: str = "INFO"
    parent_pid: int = 0
    """Process that the runner dies with; 0 = the one that started it."""


class Thoughts(msgspec.Struct, frozen=True, kw_only=True):
    """Where a reply thinks before its grammar begins."""

    opening: bytes
    """The reply may begin with this, and then thinks; empty = it can't begin to."""
    closing: str
    """A regular expression over bytes as in `Trigger`: the grammar begins behind its first match."""
    opened: bool
    """Whether the prompt has begun the thinking already."""


class Trigger(msgspec.Struct, frozen=True, kw_only=True):
    """A grammar for what follows a pattern in a reply that is otherwise free: calls of tools with strict schemas."""

    pattern: str
    """A regular expression over the reply's bytes, a byte 255 standing before those of every special token."""
    lark: str
    """The grammar that begins behind it, in Lark's notation; the reply is free again behind that."""
    ends: bool = False
    """Whether the reply ends there instead."""
    in_thoughts: bool = False
    """Whether it holds in thoughts as well."""


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """What a reply must be. It ends when nothing more can follow, and stop tokens wait until it is whole."""

    kind: Literal["json_schema", "regex", "lark", "free"]
    """`free`: anything at all, but for what follows its triggers."""
    text: str = ""
    """A JSON schema as JSON text, a regular expression for the whole reply, or a grammar in Lark's notation."""
    thoughts: Thoughts | None = None
    """None: the grammar begins with the reply."""
    calls: list[bytes] = []
    """What tool calls begin with: a reply may begin with one instead, and is free from there on."""
    calls_stop: bool = False
    """Whether thoughts may end the reply, with a call that they lead to."""
    triggers: list[Trigger] = []
    """What holds in calls and in free text."""


# --- server → runner


class Vocabulary(msgspec.Struct, tag="vocabulary"):
    """The exact bytes of every token, before the first request with a grammar."""

    tokens: list[bytes]
    """By id; empty for ids without a text."""
    special: list[int]
    """Ids of control tokens, which no grammar's text holds."""


class Submit(msgspec.Struct, tag="submit", kw_only=True):
    """Generate from a prompt of token ids."""

    id: str
    tokens: list[int]
    max_tokens: int
    """Most new tokens; ≤ 0 = the rest of the context."""
    stop_tokens: list[int]
    """Ids that end the row; not part of the reply."""
    sampling: SamplingOptions
    boundaries: list[int] = []
    """Offsets in `tokens` where messages end: good restore points for the prefix cache."""
    images: list[PlacedImage] = []
    """In order, each over placeholder tokens of its own."""
    grammar: Grammar | None = None
    """None: the reply is free. Needs a `Vocabulary` before."""


Pooling = Literal["mean", "cls", "last"]
"""How a text's vector is made of its tokens' states: their mean, the first one's, or the last one's."""


class Embed(msgspec.Struct, tag="embed", kw_only=True):
    """Turn texts into vectors; answered by `Embedded`, or `Failed`."""

    id: str
    texts: list[list[int]]
    """Token ids of each, special ones included; none is empty."""
    pooling: Pooling


class Cancel(msgspec.Struct, tag="cancel"):
    """Stop a row: between prefill chunks or decode steps; it still answers `Finished` with reason `cancelled`."""

    id: str


class Limit(msgspec.Struct, tag="limit"):
    """What rows may take from now on; rows already admitted keep what they have."""

    context_length: int
    """Most tokens of one row, never above the model's own limit; 0 = that limit."""
    cache_bytes: int
    """Bytes that the caches of all admitted rows may reserve together; 0 = no limit."""


class StatusRequest(msgspec.Struct, tag="status"):
    """Ask for a `Status`."""

    id: str


class Shutdown(msgspec.Struct, tag="shutdown"):
    """Finish nothing more: free everything and exit."""


ToRunner = Vocabulary | Submit | Embed | Cancel | Limit | StatusRequest | Shutdown


# --- runner → server


class Loading(msgspec.Struct, tag="loading"):
    """Progress of a load, at least every second while bytes arrive."""

    done: int
    total: int
    stage: str


class Ready(msgspec.Struct, tag="ready", kw_only=True):
    """The model is loaded and warmed up."""

    architecture: str
    context_length: int
    """Most tokens of one row: the model's own limit, or the configured one when that is lower."""
    vocab_size: int
    weight_bytes: int
    cache_bytes_per_token: int
    """Upper bound over all layers, for admission."""
    cache_step: int = 256
    """Positions by which caches grow."""
    cache_ahead: int = 0
    """How many more than they hold they have room for when they do."""
    cache_bytes_fixed: int = 0
    """Bytes of a row's states that don't grow, those that its draft keeps besides included."""
    round_bytes: int = 0
    """Bytes that a round of drafts takes besides: the states behind each of them. One row drafts at a time."""
    max_rows: int = 1
    """Rows that it runs at once; more wait in its queue."""
    device: str
    """`cpu` or `gpu`, then the chip's name in parentheses."""
    dtype: str
    load_seconds: float


class LoadFailed(msgspec.Struct, tag="load_failed"):
    """The model cannot be loaded; the process exits after this."""

    error: str
    """Name of the class in `arriero.errors`."""
    message: str


class PrefixUsed(msgspec.Struct, tag="prefix"):
    """How much of an admitted row's prompt was stored, sent where prefixes are stored at all."""

    id: str
    total: int
    matched: int
    """Tokens that are stored from the start on."""
    restored: int
    """Tokens that need no computing; fewer than `matched` where states could only be restored earlier."""
    stored: list[int] = []
    """The first stored tokens where the prompt differs; above 2³¹ stands for an image."""


class PrefillProgress(msgspec.Struct, tag="prefill"):
    """Prompt tokens of a row that are in its caches."""

    id: str
    done: int
    total: int


class TokenLogprob(msgspec.Struct, array_like=True):
    """Log-probability of a chosen token and the likeliest alternatives, from raw logits."""

    logprob: float
    top: list[tuple[int, float]]


class Tokens(msgspec.Struct, tag="tokens"):
    """New tokens of a row, in order; without the stop token."""

    id: str
    tokens: list[int]
    logprobs: list[TokenLogprob] | None = None


class SpeculationUsed(msgspec.Struct, frozen=True, kw_only=True):
    """What drafting did for a row."""

    kind: str
    """`lookup`, or the draft's architecture."""
    rounds: int
    """Rounds with drafts; each gave what stayed and one token more."""
    drafted: int
    accepted: int
    reached_by_position: list[int]
    """How often the draft of each place in a round was looked at: until the first that did not stay."""
    accepted_by_position: list[int]
    plain_steps: int
    """Steps that could have had drafts and went plainly: none were found, or they would not have paid."""
    parked_ns: int
    """Time of those steps."""


class Finished(msgspec.Struct, tag="finished", kw_only=True):
    """The last message of a row."""

    id: str
    reason: Literal["stop", "length", "cancelled"]
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that came from the prefix cache."""
    generated_tokens: int
    prefill_ns: int
    decode_ns: int
    speculation: SpeculationUsed | None = None
    """None where nothing could draft."""


class Embedded(msgspec.Struct, tag="embedded"):
    """The vectors of an `Embed`, in its order."""

    id: str
    width: int
    vectors: bytes
    """float32, little-endian, as the model gives them: not normalised."""


class Failed(msgspec.Struct, tag="failed"):
    """The row ended with an error; the runner lives on."""

    id: str
    error: str
    """Name of the class in `arriero.errors`."""
    message: str


class Status(msgspec.Struct, tag="status_reply", kw_only=True):
    """A snapshot of the engine; answered by the message thread, never waiting for the array thread."""

    id: str
    rows_running: int
    rows_waiting: int
    memory_bytes: int
    """Active and cached bytes of the allocator, last known."""
    peak_bytes: int
    cache_bytes: int
    """Bytes of live caches."""
    snapshot_bytes: int
    tokens_generated: int
    tokens_prefilled: int
    speculation: str = ""
    """What drafts: `lookup`, an architecture, or '' for nothing."""
    drafts_judged: int = 0
    drafts_accepted: int = 0
    draft_rounds: int = 0


FromRunner = (
    Loading | Ready | LoadFailed | PrefixUsed | PrefillProgress | Tokens | Finished | Embedded | Failed | Status
)

encode = msgspec.msgpack.Encoder().encode
decode_to_runner = msgspec.msgpack.Decoder(ToRunner).decode
decode_from_runner = msgspec.msgpack.Decoder(FromRunner).decode
