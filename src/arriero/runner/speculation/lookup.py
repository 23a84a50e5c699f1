"""Drafts copied from the row's own text: what followed an earlier occurrence of its last tokens."""

from __future__ import annotations

from typing import Protocol

import numpy as np

SHORTEST = 3
"""Tokens that must agree for what followed them to be worth a try."""
LONGEST = 32
"""Agreeing tokens beyond which a longer match says nothing new."""
LIMIT = 8
"""Drafts of one round."""


class Copies(Protocol):
    """Guesses what follows a row's tokens without any model."""

    @property
    def held(self) -> int:
        """Tokens that it has been told."""
        ...

    def extend(self, tokens: np.ndarray) -> None:
        """The row's next tokens, int32 `[n]`."""
        ...

    def find(self, most: int) -> list[int]:
        """Up to `most` tokens that may follow; empty when it has no guess."""
        ...


class Lookup:
    """The tokens of one row, prompt and reply, and the search in them.

    A search is a few passes over all tokens (0.1 ms for 100,000), so there is no index to keep. Source: prompt lookup
    decoding, Saxena 2023.
    """

    def __init__(self) -> None:
        self._buffer = np.zeros(0, np.int32)
        self._held = 0

    @property
    def held(self) -> int:
        return self._held

    @property
    def tokens(self) -> np.ndarray:
        """What is known, int32 `[n]`."""
        return self._buffer[: self._held]

    def extend(self, tokens: np.ndarray) -> None:
        """Append tokens."""
        end = self._held + len(tokens)
        if end > len(self._buffer):
            grown = np.zeros(max(end, 2 * len(self._buffer), 256), np.int32)
            grown[: self._held] = self.tokens
            self._buffer = grown
        self._buffer[self._held : end] = tokens
        self._held = end

    def find(self, most: int) -> list[int]:
        """Up to `most` tokens that may follow; empty where the last ones have not occurred before.

        They follow the longest agreement, among equal ones the latest, and are at most twice as many as agree. An
        occurrence whose continuation runs into the end is a loop, which goes on.
        """
        known = self.tokens
        last = len(known) - 1
        if most < 1 or last < SHORTEST:
            return []
        ends = np.flatnonzero(known[:last] == known[last])
        agreeing = int(len(ends) > 0)
        while 0 < agreeing < LONGEST:
            longer = ends[ends >= agreeing]
            longer = longer[known[longer - agreeing] == known[last - agreeing]]
            if not len(longer):
                break
            ends, agreeing = longer, agreeing + 1
        if agreeing < SHORTEST:
            return []
        start = int(ends[-1]) + 1
        period = last + 1 - start
        picks = start + np.arange(min(most, 2 * agreeing)) % period
        copied: list[int] = known[picks].tolist()
        return copied
