"""Drivers that feed a stream of tokens to a cache of any kind, and say what it must hold after that stream.

Every driver computes the contents from the whole stream in numpy, so a cache that went through any history can be
compared with one that saw the stream at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from arriero.runner.caches import KVCache, NGramCache, RangeSnapshot, RecurrentCache, SlidingCache, StateSnapshot

Stream = Sequence[int]


def in_place(buffer: mx.array, update: mx.array, start: int) -> mx.array:
    """An append that writes into the buffer's own memory at once, as a native kernel may."""
    mx.eval(buffer, update)
    mx.synchronize()
    memory = np.array(buffer, copy=False)
    memory[..., start : start + update.shape[2], :] = np.array(update)
    return buffer


class Attention:
    """Keys and values: position p of a stream holds numbers made of its token and p."""

    sliceable = True
    heads, key_dim, value_dim = 2, 3, 2

    def __init__(self, window: int | None = None, value_dim: int = 2) -> None:
        self.window = window
        self.value_dim = value_dim
        self.sliceable = window is None

    def new(self) -> KVCache | SlidingCache:
        if self.window is None:
            return KVCache(self.heads, self.key_dim, self.value_dim, mx.float32)
        return SlidingCache(self.heads, self.key_dim, self.value_dim, mx.float32, self.window)

    def expected(self, stream: Stream, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.array(stream[start:end], np.float32)[None, None, :, None]
        positions = np.arange(start, end, dtype=np.float32)[None, None, :, None]
        head = np.arange(self.heads, dtype=np.float32)[None, :, None, None]
        key = tokens + 1000 * head + 0.25 * np.arange(self.key_dim, dtype=np.float32) + positions / 4096
        value = -tokens + 500 * head + 0.5 * np.arange(self.value_dim, dtype=np.float32) - positions / 4096
        return key.astype(np.float32), value.astype(np.float32)

    def feed(self, cache, stream: Stream, tokens: Stream, check: bool = True) -> list[int]:
        """Append; checks what the queries of this write get to see, or leaves all of it lazy."""
        start = len(stream)
        stream = [*stream, *tokens]
        keys, values, base = cache.append(*(mx.array(a) for a in self.expected(stream, start, len(stream))))
        if check:
            self.same(stream, keys, values, base, self.needed(start))
        return stream

    def needed(self, position: int) -> int:
        """The first position that the query at `position` may look at."""
        return 0 if self.window is None else max(0, position - self.window + 1)

    def same(self, stream: Stream, keys: mx.array, values: mx.array, base: int, first: int) -> None:
        assert base <= first
        wanted = self.expected(stream, first, len(stream))
        for found, expected in zip((keys, values), wanted, strict=True):
            assert found.shape[2] == len(stream) - base
            assert np.array_equal(np.array(found)[:, :, first - base :], expected)

    def check(self, cache, stream: Stream) -> None:
        assert cache.offset == len(stream)
        keys, values, base = cache.view()
        self.same(stream, keys, values, base, min(len(stream), self.needed(len(stream))))

    def check_snapshot(self, snapshot: RangeSnapshot, stream: Stream) -> None:
        assert snapshot.end == len(stream)
        if self.window is not None:
            assert snapshot.start <= self.needed(snapshot.end)
            assert snapshot.end - snapshot.start <= self.window
        wanted = self.expected(stream, snapshot.start, snapshot.end)
        for found, expected in zip(snapshot.arrays(), wanted, strict=True):
            assert np.array_equal(np.array(found), expected)
        held = (snapshot.end - snapshot.start) * self.heads * (self.key_dim + self.value_dim) * 4
        assert snapshot.nbytes == (0 if snapshot.lazy else held)


class State:
    """A whole state: a float that folds all tokens in, and the last tokens themselves."""

    sliceable = False
    window = None
    tail = 3

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def new(self) -> RecurrentCache | NGramCache:
        if self.kind is RecurrentCache:
            return RecurrentCache(self.tail, 2, mx.float32, (2, 2))
        return NGramCache(2, -7, self.tail, 2, mx.float32)

    def expected(self, stream: Stream) -> tuple[np.ndarray, np.ndarray]:
        tail = np.array(([0] * self.tail + list(stream))[-self.tail :], np.float32)
        conv = np.broadcast_to(tail[None, :, None], (1, self.tail, 2)).copy()
        if self.kind is NGramCache:
            return np.array(([-7, -7, *stream])[-2:], np.int32), conv
        folded = np.float32(0)
        for token in stream:
            folded = np.float32(folded * np.float32(0.75) + np.float32(token))
        return conv, np.full((1, 2, 2), folded, np.float32)

    def step(self, state: Sequence[np.ndarray], token: int) -> tuple[np.ndarray, ...]:
        """The next state from the last one only, as a layer computes it."""
        moved = []
        for array, part in zip(state, ("ids", "conv") if self.kind is NGramCache else ("conv", "fold"), strict=True):
            if part == "ids":
                moved.append(np.array([array[1], token], np.int32))
            elif part == "conv":
                moved.append(np.concatenate([array[:, 1:], np.full((1, 1, 2), token, np.float32)], axis=1))
            else:
                moved.append((array * np.float32(0.75) + np.float32(token)).astype(np.float32))
        return tuple(moved)

    def feed(self, cache, stream: Stream, tokens: Stream, check: bool = True) -> list[int]:
        wanted = [*cache.splits(len(tokens)), len(tokens)]
        state = tuple(np.array(array) for array in cache.get())
        states = []
        for count, token in enumerate(tokens, 1):
            state = self.step(state, token)
            if count in wanted:
                states.append(tuple(mx.array(array) for array in state))
        cache.put(states, len(tokens))
        return [*stream, *tokens]

    def check(self, cache, stream: Stream) -> None:
        assert cache.offset == len(stream)
        for found, expected in zip(cache.get(), self.expected(stream), strict=True):
            assert np.array_equal(np.array(found), expected)

    def check_snapshot(self, snapshot: StateSnapshot, stream: Stream) -> None:
        assert snapshot.end == len(stream)
        wanted = self.expected(stream)
        for found, expected in zip(snapshot.arrays, wanted, strict=True):
            assert np.array_equal(np.array(found), expected)
        assert snapshot.nbytes == sum(array.nbytes for array in wanted)


KINDS = {
    "full": Attention(),
    "full without values": Attention(value_dim=0),
    "sliding": Attention(window=16),
    "sliding window of 1": Attention(window=1),
    "sliding window not of a step": Attention(window=21),
    "recurrent": State(RecurrentCache),
    "n-gram": State(NGramCache),
}
