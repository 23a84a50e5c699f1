"""The last tokens of every row with penalties, on the device, so that a token counts before the host has read it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import mlx.core as mx
import numpy as np

NONE = -1
"""Marks a place without a token."""


class _Ring:
    """Where a row's tokens are: a line of the pool, its first `window` places, the next of which is `next`."""

    __slots__ = ("line", "next", "window")

    def __init__(self, line: int, window: int, held: int) -> None:
        self.line = line
        self.window = window
        self.next = held % window

    def places(self, count: int) -> list[int]:
        """The places of the next `count` tokens, and the ring moved past them."""
        places = [(self.next + i) % self.window for i in range(count)]
        self.next = (self.next + count) % self.window
        return places


class History:
    """One int32 array `[lines, width]`, a ring of tokens per line; shapes never change while rows decode.

    Penalties don't care about order, so a ring need not be unrolled. `width` is the widest window; narrower rows leave
    the rest of their line empty.
    """

    def __init__(self) -> None:
        self._pool: mx.array | None = None
        self._rings: dict[Hashable, _Ring] = {}
        self._free: list[int] = []

    def __contains__(self, row: Hashable) -> bool:
        return row in self._rings

    def state(self) -> list[mx.array]:
        """Arrays that hold the history."""
        return [] if self._pool is None else [self._pool]

    def add(self, row: Hashable, window: int, tokens: Sequence[int]) -> None:
        """Follow a row whose prompt is `tokens`; the last `window` ≥ 1 of them are kept."""
        held = np.array(tokens[-window:], np.int32)
        self._widen(window)
        assert self._pool is not None
        line = np.full(self._pool.shape[1], NONE, np.int32)
        line[: held.size] = held
        if self._free:
            at = self._free.pop()
            self._pool[at] = mx.array(line)
        else:
            at = self._pool.shape[0]
            self._pool = mx.concatenate([self._pool, mx.array(line)[None]], axis=0)
        self._rings[row] = _Ring(at, window, held.size)

    def remove(self, row: Hashable) -> None:
        """Forget a row; nothing happens for one that is not followed."""
        ring = self._rings.pop(row, None)
        if ring is None:
            return
        self._free.append(ring.line)
        if not self._rings:
            self._pool = None
            self._free.clear()

    def lines(self, rows: Sequence[Hashable]) -> mx.array:
        """Which lines of the pool are those of `rows`, `[n]` int32; valid until a row is added or removed."""
        return mx.array([self._rings[row].line for row in rows], mx.int32)

    def tokens(self, lines: mx.array) -> mx.array:
        """Tokens `[n, width]` of lines, −1 where there is none."""
        assert self._pool is not None
        return self._pool[lines]

    def push(self, rows: Sequence[Hashable], lines: mx.array, tokens: mx.array) -> None:
        """Append one token `[n]` (lazy or not) to each row; `lines` as `lines(rows)` gave."""
        assert self._pool is not None
        places = mx.array([self._rings[row].places(1)[0] for row in rows], mx.int32)
        self._pool[lines, places] = tokens

    def commit(self, row: Hashable, tokens: mx.array) -> None:
        """Append several tokens `[m]` to one row; only the last window of them matter."""
        assert self._pool is not None
        ring = self._rings[row]
        places = ring.places(tokens.shape[0])[-ring.window :]
        if places:
            self._pool[ring.line, mx.array(places, mx.int32)] = tokens[-len(places) :]

    def chained(self, row: Hashable, chain: mx.array, count: int) -> mx.array:
        """What `count` rows of logits over a chain of drafts `[d]` see: tokens `[count, width]`; the ring stays.

        The last row sees all drafts, each earlier one a draft fewer. ValueError for more rows than `d + 1`.
        """
        drafts = chain.shape[0]
        if count > drafts + 1:
            raise ValueError(
                f"{count} rows of logits over a chain of {drafts} drafts; at most {drafts + 1} have a place in it"
            )
        assert self._pool is not None
        ring = self._rings[row]
        width = self._pool.shape[1]
        # Place p of a row takes the latest draft that would be written there, else what the ring has.
        source = np.tile(np.arange(width, dtype=np.int32), (count, 1))
        for i in range(count):
            for draft in range(drafts - count + 1 + i):
                source[i, (ring.next + draft) % ring.window] = width + draft
        return mx.concatenate([self._pool[ring.line], chain.astype(mx.int32)])[mx.array(source)]

    def _widen(self, window: int) -> None:
        if self._pool is None:
            self._pool = mx.zeros((0, window), mx.int32)
        elif self._pool.shape[1] < window:
            missing = window - self._pool.shape[1]
            self._pool = mx.pad(self._pool, [(0, 0), (0, missing)], constant_values=NONE)
