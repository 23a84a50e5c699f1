"""Shortening a conversation that doesn't fit: whole exchanges from the oldest, never a part of one."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from arriero.chat.messages import Conversation, Message
from arriero.errors import PromptTooLong

_SYSTEM = ("system", "developer")


class Truncated(msgspec.Struct, frozen=True):
    """What is left of a conversation."""

    conversation: Conversation
    dropped: int
    """Messages that were left out."""
    tokens: list[int]
    """The prompt."""


def truncate(conversation: Conversation, limit: int, encode: Callable[[Conversation], list[int]]) -> Truncated:
    """Leave out as few of the oldest exchanges as make the prompt fit `limit` tokens.

    An exchange is a user's message and all that follows it up to the next one, so calls stay with their results. System
    messages, tools and the last exchange are always kept. Raises PromptTooLong when these alone don't fit.
    """
    tokens = encode(conversation)
    if len(tokens) <= limit:
        return Truncated(conversation, 0, tokens)
    exchanges = _exchanges(conversation.messages)
    full = len(tokens)
    # `low` exchanges are known to be too few to leave out, `high` to be enough once it was measured.
    low, high = 0, len(exchanges) - 1
    best = _without(conversation, exchanges, high)
    tokens = encode(best.conversation)
    if len(tokens) > limit:
        raise PromptTooLong(
            f"the prompt has {full} tokens and the context window {limit}; the system message, the tools and the last "
            f"exchange alone need {len(tokens)}. Shorten them or raise num_ctx"
        )
    best = msgspec.structs.replace(best, tokens=tokens)
    while high - low > 1:
        middle = (low + high) // 2
        shorter = _without(conversation, exchanges, middle)
        tokens = encode(shorter.conversation)
        if len(tokens) <= limit:
            high, best = middle, msgspec.structs.replace(shorter, tokens=tokens)
        else:
            low = middle
    return best


def _exchanges(messages: list[Message]) -> list[set[int]]:
    """Indices of the messages of each exchange, oldest first; system messages belong to none."""
    exchanges: list[set[int]] = []
    previous = ""
    for index, message in enumerate(messages):
        if message.role in _SYSTEM:
            continue
        # Neighbouring user messages are one question.
        if not exchanges or (message.role == "user" and previous != "user"):
            exchanges.append(set())
        exchanges[-1].add(index)
        previous = message.role
    return exchanges


def _without(conversation: Conversation, exchanges: list[set[int]], count: int) -> Truncated:
    dropped: set[int] = set().union(*exchanges[:count]) if count > 0 else set()
    messages = [message for index, message in enumerate(conversation.messages) if index not in dropped]
    return Truncated(Conversation(messages=messages, tools=conversation.tools), len(dropped), [])
