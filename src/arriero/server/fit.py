"""Making a conversation fit its context window: whole oldest exchanges go, or the request is refused with the numbers.

The rule, for every model and API: system and developer messages, tools and the last exchange (from the last user
message on) always stay. When the prompt doesn't fit, the oldest exchanges are dropped, each with its replies, calls and
results, until a quarter of the window (or `num_predict`, if that is less) is free for the reply; when not even the last
exchange leaves that much, it need only fit. Refuses to know how messages become tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from arriero.errors import PromptTooLong


class HasRole(Protocol):
    """Anything with a role: the neutral message."""

    @property
    def role(self) -> str:
        """`system`, `developer`, `user`, `assistant` or `tool`."""
        ...


class Sized(Protocol):
    """A prompt that knows its number of tokens."""

    def __len__(self) -> int: ...


M = TypeVar("M", bound=HasRole)
P = TypeVar("P", bound=Sized)

_KEPT = ("system", "developer")


@dataclass(frozen=True, slots=True)
class Fitted(Generic[P]):
    """A prompt that fits, and how many messages were left out for it."""

    prompt: P
    dropped_messages: int = 0


def check_fits(tokens: int, window: int, limit: int) -> None:
    """Raise PromptTooLong unless a prompt leaves room for one token of reply; `limit` is the model's own window."""
    if tokens < window:
        return
    wider = f"raise num_ctx (this model goes up to {limit})" if window < limit else "use a model with a longer context"
    raise PromptTooLong(
        f"the prompt has {tokens} tokens and the context window holds {window}, the reply included; "
        f"shorten the prompt or {wider}"
    )


def fit(
    messages: Sequence[M],
    encode: Callable[[list[M]], P],
    *,
    window: int,
    limit: int,
    num_predict: int = -1,
    truncate: bool = True,
) -> Fitted[P]:
    """The prompt of all messages, or of as many of the newest exchanges as fit (see the module's rule).

    `encode` makes a prompt of some of the messages; it is called O(log exchanges) times. Raises PromptTooLong with the
    number of tokens, the window and the model's limit when nothing may or can be dropped.
    """
    whole = encode(list(messages))
    if len(whole) < window:
        return Fitted(whole)
    exchanges = split_exchanges(messages)
    if not truncate or len(exchanges) < 2:
        check_fits(len(whole), window, limit)
    room = min(num_predict, window // 4) if num_predict > 0 else window // 4

    def without(count: int) -> tuple[list[M], P]:
        gone = {index for exchange in exchanges[:count] for index in exchange}
        kept = [message for index, message in enumerate(messages) if index not in gone]
        return kept, encode(kept)

    low, high = 1, len(exchanges) - 1
    best = without(high)
    check_fits(len(best[1]), window, limit)
    while low < high:
        middle = (low + high) // 2
        trial = without(middle)
        if len(trial[1]) <= window - max(room, 1):
            best, high = trial, middle
        else:
            low = middle + 1
    return Fitted(best[1], len(messages) - len(best[0]))


def split_exchanges(messages: Sequence[HasRole]) -> list[list[int]]:
    """Indices of the messages of each exchange: a user message and what follows it, system messages left out.

    What precedes the first user message (a greeting, say) goes with the first exchange; so do several user messages
    in a row with the last of them, which the reply answers.
    """
    exchanges: list[list[int]] = [[]]
    answered = False
    for index, message in enumerate(messages):
        if message.role in _KEPT:
            continue
        if message.role == "user" and answered:
            exchanges.append([])
            answered = False
        answered = answered or message.role != "user" and any(messages[i].role == "user" for i in exchanges[-1])
        exchanges[-1].append(index)
    return exchanges
