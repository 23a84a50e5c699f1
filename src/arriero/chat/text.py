"""Streams of text: token ids → text whole characters at a time, and stop strings over any split."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from arriero.chat.tokenizer import Tokenizer
from arriero.errors import InvalidRequest

_UTF8 = codecs.getincrementaldecoder("utf-8")


class StreamDecoder:
    """Turns the ids of a reply into text as they come.

    A character whose bytes lie in several tokens comes out whole, with its last token; a byte that can't be UTF-8 comes
    out as U+FFFD at once. The joined pieces equal `tokenizer.decode(ids, start=False)` without the hidden tokens.
    """

    def __init__(self, tokenizer: Tokenizer, hidden: Iterable[int] | None = None) -> None:
        """`hidden` are tokens that have no text (default: stop tokens, BOS, EOS and padding)."""
        self._tokenizer = tokenizer
        self._hidden = tokenizer.hidden_ids if hidden is None else frozenset(hidden)
        self._decoder = _UTF8("replace")

    @property
    def pending(self) -> bool:
        """Whether bytes of an incomplete character are waiting (their log-probabilities wait too)."""
        return bool(self._decoder.getstate()[0])

    def feed(self, ids: Iterable[int]) -> str:
        """The text that these tokens complete; may be empty."""
        data = b"".join(self._tokenizer.token_bytes(index) for index in ids if index not in self._hidden)
        return self._decoder.decode(data.replace(b"\0", b""))

    def flush(self) -> str:
        """What is left at the end of the reply: one U+FFFD for an unfinished character, else nothing."""
        text = self._decoder.decode(b"", True)
        self._decoder.reset()
        return text


class StopStrings:
    """Cuts a stream before the stop string that is completed first.

    Of several completed by the same character, the one that begins first counts. The result doesn't depend on how the
    text is split.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises InvalidRequest for an empty string, which every text would contain."""
        if any(not stop for stop in stops):
            raise InvalidRequest("a stop string is empty; leave it out or give at least one character")
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""
        self.stopped: str | None = None
        """The stop string that was found."""

    def feed(self, text: str) -> str:
        """The text that can't be part of a stop string any more; nothing once one was found."""
        if self.stopped is not None or not self._stops:
            return "" if self.stopped is not None else text
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, start, self.stopped = min(found)
            self._held = ""
            return text[:start]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The held-back text at the end of the reply: it turned out to be no stop string."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
