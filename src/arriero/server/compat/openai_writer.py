"""Events of a generation → OpenAI's chat completions and completions, whole or piece by piece."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from msgspec import UNSET

from arriero.chat import messages as chat
from arriero.server.completion import Final
from arriero.server.schemas import openai as wire
from arriero.server.transcript import Delta, Likelihood, Logprob


def new_id(prefix: str) -> str:
    """An id that no other object has."""
    return prefix + secrets.token_hex(12)


def usage_of(final: Final) -> wire.Usage:
    """What a reply took."""
    return wire.Usage(
        prompt_tokens=len(final.prompt),
        completion_tokens=final.generated_tokens,
        total_tokens=len(final.prompt) + final.generated_tokens,
        prompt_tokens_details=wire.PromptDetails(cached_tokens=final.cached_tokens),
        completion_tokens_details=wire.CompletionDetails(reasoning_tokens=final.thinking_tokens),
        **truncation(final),
    )


def truncation(final: Final) -> dict[str, Any]:
    """What was left out of the prompt to make it fit, as a field of the usage (ours); nothing when nothing was."""
    dropped = final.prompt.dropped_messages
    return {"truncated": {"dropped_messages": dropped}} if dropped else {}


def logprobs_of(items: Sequence[Logprob]) -> list[wire.Logprob]:
    """Log-probabilities with tokens as text and as bytes."""

    def shown(item: Likelihood) -> dict[str, Any]:
        return {
            "token": item.data.decode("utf-8", "replace"),
            "logprob": item.logprob,
            "bytes": list(item.data),
        }

    return [
        wire.Logprob(**shown(item.chosen), top_logprobs=[wire.TopLogprob(**shown(one)) for one in item.top])
        for item in items
    ]


class ChatChunks:
    """One streamed chat completion: the role once, calls counted from 0, one finish, usage at the end when asked for.

    `feed` after `end` is an error of the caller; the order can't be had otherwise.
    """

    def __init__(self, model: str, *, usage: bool = False, logprobs: bool = False, parallel: bool = True) -> None:
        """`parallel` False keeps the first call only."""
        self._head: dict[str, Any] = {"id": new_id("chatcmpl-"), "created": int(time.time()), "model": model}
        self._usage = usage
        self._logprobs = logprobs
        self._parallel = parallel
        self._calls = 0
        self._begun = self._ended = False

    def feed(self, delta: Delta) -> list[wire.ChatReply]:
        """The events of one piece."""
        if self._ended:
            raise RuntimeError("a piece after the end of a reply")
        piece = wire.ReplyMessage()
        if delta.thinking:
            piece.reasoning = piece.reasoning_content = delta.thinking
        if delta.content:
            piece.content = delta.content
        calls = [self._call(call) for call in self._kept(delta.tool_calls)]
        if calls:
            piece.tool_calls = calls
        logprobs = None
        if self._logprobs and delta.logprobs and not delta.thinking and not delta.tool_calls:
            logprobs = wire.Logprobs(content=logprobs_of(delta.logprobs))
        if piece == wire.ReplyMessage() and logprobs is None:
            return []
        return [self._chunk(piece, logprobs)]

    def end(self, final: Final) -> list[wire.ChatReply]:
        """The last events."""
        if self._ended:
            raise RuntimeError("a second end of a reply")
        chunks = [] if self._begun else [self._chunk(wire.ReplyMessage())]
        self._ended = True
        reason: wire.FinishReason = "tool_calls" if self._calls and final.reason == "stop" else final.reason
        chunks.append(self._reply([wire.Choice(delta=wire.ReplyMessage(), finish_reason=reason)]))
        if self._usage:
            chunks.append(self._reply([], usage_of(final)))
        return chunks

    def _kept(self, calls: list[chat.ToolCall]) -> list[chat.ToolCall]:
        return calls if self._parallel else calls[: max(0, 1 - self._calls)]

    def _call(self, call: chat.ToolCall) -> wire.ToolCall:
        self._calls += 1
        return wire.ToolCall(
            index=self._calls - 1,
            id=call.id or new_id("call_"),
            function=wire.Function(name=call.name, arguments=call.text()),
        )

    def _chunk(self, piece: wire.ReplyMessage, logprobs: wire.Logprobs | None = None) -> wire.ChatReply:
        if not self._begun:
            self._begun = True
            piece.role = "assistant"
            piece.content = "" if piece.content is UNSET else piece.content
        return self._reply([wire.Choice(delta=piece, logprobs=logprobs, finish_reason=None)])

    def _reply(self, choices: list[wire.Choice], usage: wire.Usage | None = None) -> wire.ChatReply:
        return wire.ChatReply(
            object="chat.completion.chunk", choices=choices, usage=usage if self._usage else UNSET, **self._head
        )


def whole_chat(chunks: Sequence[wire.ChatReply]) -> wire.ChatReply:
    """The reply that a stream with usage adds up to."""
    content, reasoning = "", ""
    calls: list[wire.ToolCall] = []
    logprobs: list[wire.Logprob] = []
    finish: wire.FinishReason | None = None
    for chunk in chunks:
        for choice in chunk.choices:
            assert choice.delta is not UNSET
            content += choice.delta.content or ""
            reasoning += choice.delta.reasoning or ""
            calls += choice.delta.tool_calls or []
            logprobs += choice.logprobs.content if choice.logprobs else []
            finish = choice.finish_reason or finish
    message = wire.ReplyMessage(role="assistant", content=content or (None if calls else ""), refusal=None)
    if reasoning:
        message.reasoning = message.reasoning_content = reasoning
    if calls:
        message.tool_calls = calls
    choice = wire.Choice(
        message=message, logprobs=wire.Logprobs(content=logprobs) if logprobs else None, finish_reason=finish
    )
    last = chunks[-1]
    return wire.ChatReply(
        id=last.id,
        object="chat.completion",
        created=last.created,
        model=last.model,
        choices=[choice],
        usage=last.usage,
    )


class TextChunks:
    """One streamed completion. Thoughts are left out: the API has no place for them."""

    def __init__(self, model: str, *, usage: bool = False, logprobs: bool = False) -> None:
        self._head: dict[str, Any] = {"id": new_id("cmpl-"), "created": int(time.time()), "model": model}
        self._usage = usage
        self._logprobs = logprobs
        self._length = 0

    def feed(self, delta: Delta) -> list[wire.TextReply]:
        """The events of one piece."""
        text = delta.content + "".join(call.text() for call in delta.tool_calls)
        logprobs = None
        if self._logprobs and delta.logprobs and not delta.thinking:
            logprobs = self._describe(delta.logprobs)
        self._length += len(text)
        if not text and logprobs is None:
            return []
        return [self._reply([wire.TextChoice(text=text, logprobs=logprobs, finish_reason=None)])]

    def end(self, final: Final) -> list[wire.TextReply]:
        """The last events."""
        chunks = [self._reply([wire.TextChoice(text="", finish_reason=final.reason)])]
        if self._usage:
            chunks.append(self._reply([], usage_of(final)))
        return chunks

    def _describe(self, items: Sequence[Logprob]) -> wire.TextLogprobs:
        tokens = [item.chosen.data.decode("utf-8", "replace") for item in items]
        offsets, offset = [], self._length
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return wire.TextLogprobs(
            tokens=tokens,
            token_logprobs=[item.chosen.logprob for item in items],
            top_logprobs=[{one.data.decode("utf-8", "replace"): one.logprob for one in item.top} for item in items],
            text_offset=offsets,
        )

    def _reply(self, choices: list[wire.TextChoice], usage: wire.Usage | None = None) -> wire.TextReply:
        return wire.TextReply(choices=choices, usage=usage if self._usage else UNSET, **self._head)


def whole_text(chunks: Sequence[wire.TextReply]) -> wire.TextReply:
    """The reply that a stream with usage adds up to."""
    choices = [choice for chunk in chunks for choice in chunk.choices]
    described = [choice.logprobs for choice in choices if choice.logprobs is not None]
    logprobs = wire.TextLogprobs(
        tokens=[token for one in described for token in one.tokens],
        token_logprobs=[value for one in described for value in one.token_logprobs],
        top_logprobs=[value for one in described for value in one.top_logprobs],
        text_offset=[value for one in described for value in one.text_offset],
    )
    choice = wire.TextChoice(
        text="".join(choice.text for choice in choices),
        logprobs=logprobs if described else None,
        finish_reason=choices[-1].finish_reason,
    )
    last = chunks[-1]
    return wire.TextReply(id=last.id, created=last.created, model=last.model, choices=[choice], usage=last.usage)
