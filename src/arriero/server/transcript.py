"""From the tokens of a reply to its events: text, thoughts, calls, each with the log-probabilities that belong to it.

The result, folded together, doesn't depend on how the tokens arrive. Refuses to know runners and wire formats.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import msgspec

from arriero.chat.messages import ToolCall
from arriero.chat.parsers.events import Content, Event, Parser, Thinking
from arriero.chat.parsers.guard import GuardedParser
from arriero.chat.text import StopStrings, StreamDecoder
from arriero.chat.tokenizer import Tokenizer
from arriero.runner.messages import TokenLogprob

_REPEATS = 16
_LONGEST_LOOP = 16
"""Tokens of what is repeated."""


class Likelihood(msgspec.Struct, frozen=True):
    """A token's exact bytes and its log-probability."""

    data: bytes
    logprob: float


class Logprob(msgspec.Struct, frozen=True):
    """A generated token and the likeliest tokens at its place."""

    chosen: Likelihood
    top: list[Likelihood] = []


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of the reply: content, or a thought, or calls, or nothing but log-probabilities."""

    content: str = ""
    thinking: str = ""
    tool_calls: list[ToolCall] = []
    logprobs: list[Logprob] = []

    @property
    def kind(self) -> tuple[bool, bool, bool]:
        """Equal for pieces that can be joined without changing an order."""
        return (bool(self.content), bool(self.thinking), bool(self.tool_calls))


class Transcript:
    """One reply as it is generated."""

    def __init__(self, tokenizer: Tokenizer, parser: Parser, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._decoder = StreamDecoder(tokenizer)
        self._stops = StopStrings(stops)
        self._parser = GuardedParser(parser, tokenizer.tags)
        self._tags: deque[tuple[int, int]] = deque()
        """Where tokens that are tags stand in the text that is not passed on yet."""
        self._decoded = self._passed = 0
        self._waiting: list[tuple[int, Logprob]] = []
        """Log-probabilities whose text may still be cut off, with the place where that text starts."""
        self._ready: list[Logprob] = []
        """Log-probabilities whose text is in the parser's hands: they go out with the next event."""
        self._unread = 0
        """Tokens since the last event."""
        self.thinking_tokens = 0
        """Tokens that thoughts took, with the markers around them."""
        self.tokens: list[int] = []
        """Every token of the reply, in order."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found: nothing more will come out, and nothing more need be generated."""
        return self._stops.stopped is not None

    @property
    def stopped_by(self) -> str | None:
        """The stop string that was found."""
        return self._stops.stopped

    @property
    def loops(self) -> bool:
        """Whether the reply goes round in circles of tags that nobody gets to see: it would do so up to its limit.

        Only tags count: text may repeat itself with good reason, and a long call shows nothing until it is whole.
        """
        if not self.tokens or self.tokens[-1] not in self._tokenizer.tag_ids:
            return False
        for size in range(1, _LONGEST_LOOP + 1):
            end = self.tokens[-size * _REPEATS :]
            if len(end) <= self._unread and len(end) == size * _REPEATS and end[:size] * _REPEATS == end:
                return True
        return False

    def feed(self, token: int, logprob: TokenLogprob | None = None) -> list[Delta]:
        """The events that one more token completes."""
        if self.stopped:
            return []
        self.tokens.append(token)
        self._unread += 1
        if logprob is not None:
            self._waiting.append((self._decoded, self._describe(token, logprob)))
        text = self._decoder.feed((token,))
        self._decoded += len(text)
        if text and token in self._tokenizer.tag_ids:
            size = len(self._tokenizer.token_bytes(token).decode("utf-8", "replace"))
            self._tags.append((self._decoded - size, self._decoded))
        return self._pass(self._stops.feed(text))

    def finish(self) -> list[Delta]:
        """The events that the end of the reply completes: all that was held back."""
        deltas = []
        if not self.stopped:
            deltas = self._pass(self._stops.feed(self._decoder.flush()))
        if not self.stopped:
            deltas += self._pass(self._stops.flush())
            self._ready += [logprob for _, logprob in self._waiting]
        self._waiting.clear()
        deltas += self._deltas(self._parser.flush())
        if self._ready:
            deltas.append(Delta(logprobs=self._ready))
            self._ready = []
        return deltas

    def _pass(self, text: str) -> list[Delta]:
        """Hand text on to the parser, and release the log-probabilities of the tokens that it holds."""
        start = self._passed
        self._passed += len(text)
        while self._waiting and self._waiting[0][0] < self._passed:
            self._ready.append(self._waiting.pop(0)[1])
        return self._deltas([event for piece, tag in self._cut(text, start) for event in self._parser.feed(piece, tag)])

    def _cut(self, text: str, start: int) -> Iterator[tuple[str, bool]]:
        """A text that starts at a place of the reply, cut at the tokens that are tags."""
        at = 0
        while self._tags and self._tags[0][0] < self._passed:
            first, last = (max(0, place - start) for place in self._tags[0])
            if first > at:
                yield text[at:first], False
            yield text[first:last], True
            at = last
            if start + last > self._passed:
                break  # the rest of the tag waits for what may be a stop string
            self._tags.popleft()
        if at < len(text):
            yield text[at:], False

    def _deltas(self, events: list[Event]) -> list[Delta]:
        """The parser's events, the first with all log-probabilities that wait for one."""
        deltas = []
        for event in events:
            logprobs, self._ready = self._ready, []
            self.thinking_tokens += self._unread if isinstance(event, Thinking) else 0
            self._unread = 0
            if isinstance(event, Content):
                deltas.append(Delta(content=event.text, logprobs=logprobs))
            elif isinstance(event, Thinking):
                deltas.append(Delta(thinking=event.text, logprobs=logprobs))
            else:
                deltas.append(Delta(tool_calls=[event.call], logprobs=logprobs))
        return deltas

    def _describe(self, token: int, logprob: TokenLogprob) -> Logprob:
        data = self._tokenizer.token_bytes
        return Logprob(
            Likelihood(data(token), logprob.logprob), [Likelihood(data(index), value) for index, value in logprob.top]
        )
