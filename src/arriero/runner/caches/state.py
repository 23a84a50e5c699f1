"""Memories that are one whole state instead of a list of positions: recurrences, convolutions, n-gram context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from arriero.model.contract import Snapshot
from arriero.runner.caches.snapshot import StateSnapshot, copies
from arriero.runner.caches.whole import WholeCache


@dataclass(frozen=True, slots=True)
class Part:
    """One array of a state: its shape, dtype and the value that an empty history has."""

    name: str
    shape: tuple[int, ...]
    dtype: mx.Dtype
    empty: float | int = 0


class WholeState(WholeCache[StateSnapshot]):
    """A state that stands for every position so far and can be captured only as a write ends there.

    A layer calls `splits(L)` to learn after which of its next tokens a state is wanted, computes the states there and
    at the end, and hands them to `put` in order. The arrays are never written in place, so snapshots share them.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__()
        self._parts = tuple(parts)
        self._arrays: tuple[mx.array, ...] | None = None
        self._compact = True

    @property
    def nbytes(self) -> int:
        return 0 if self._arrays is None else sum(array.nbytes for array in self._arrays)

    def state(self) -> list[mx.array]:
        """The live state and the captures that were not taken yet: one evaluation makes all of them real."""
        arrays = list(self._arrays or ())
        for capture in self._schedule.captured:
            if isinstance(capture, StateSnapshot):
                arrays += capture.arrays
        return arrays

    def get(self) -> tuple[mx.array, ...]:
        """The state after `offset` positions, one array per part; empty values before the first `put`."""
        if self._arrays is None:
            self._arrays = tuple(mx.full(part.shape, part.empty, part.dtype) for part in self._parts)
            self._compact = True
        return self._arrays

    def splits(self, length: int) -> list[int]:
        """Numbers of tokens, ascending, each in `(0, length)`, after which `put` wants a state besides the last."""
        return self._schedule.interior(self._offset, length) if self._schedule else []

    def put(self, states: Sequence[Sequence[mx.array]], length: int, *, alone: bool = False) -> None:
        """Advance by `length` positions: one state per split and the one at the end, in order.

        States may be slices of a larger array. They are copied when that array is as long as a prompt; a state for
        every single token (a verification) stays as it is, since most are dropped at once. With `alone` the last one
        has memory of its own already. Raises ValueError for a wrong number of states, and for a part of another shape
        or dtype.
        """
        splits = self.splits(length)
        if length < 1 or len(states) != len(splits) + 1:
            raise ValueError(
                f"put of {len(states)} states for {length} positions; captures are planned after {splits}, so "
                f"{len(splits) + 1} are expected"
            )
        for state in states:
            self._check(state)
        self.advance(states, length, alone=alone)

    def advance(self, states: Sequence[Sequence[mx.array]], length: int, *, alone: bool = False) -> None:
        """As `put`, of states that are known to be as many as wanted, and of this cache's form."""
        if length == 1 and not self._schedule:
            self._arrays, self._compact = tuple(states[0]), alone
            self._offset += 1
            return
        every_token = len(states) == length
        kept = [tuple(state) if every_token else copies(state) for state in states[:-1]]
        kept.append(tuple(states[-1]) if every_token or alone else copies(states[-1]))
        self._compact = not every_token
        base = self._offset
        for split, arrays in zip(self.splits(length), kept, strict=False):
            self._arrays = arrays
            self._offset = base + split
            self._schedule.cross(self._offset, self._capture)
        self._arrays = kept[-1]
        self._compact = alone or not every_token
        self._offset = base + length
        if self._schedule:
            self._schedule.cross(self._offset, self._capture)

    def restore(self, snapshot: Snapshot, offset: int | None = None) -> bool:
        """Continue from a state; only at its end."""
        if not isinstance(snapshot, StateSnapshot):
            raise TypeError(f"a {type(snapshot).__name__} is not a snapshot of a whole state")
        if (offset is not None and offset != snapshot.end) or not self._fits(snapshot.arrays):
            return False
        self._schedule.abandon()
        self._arrays, self._compact, self._offset = snapshot.arrays, snapshot.compact, snapshot.end
        return True

    def _clear(self) -> None:
        self._arrays, self._compact, self._offset = None, True, 0

    def _capture(self, start: int, offset: int) -> StateSnapshot | None:
        return None if self._arrays is None else StateSnapshot(offset, self._arrays, self._compact)

    def _check(self, state: Sequence[mx.array]) -> None:
        if not self._fits(state):
            found = ", ".join(f"{array.dtype} {array.shape}" for array in state)
            wanted = ", ".join(f"{part.name} {part.dtype} {part.shape}" for part in self._parts)
            raise ValueError(f"a state of {found}; this cache holds {wanted}")

    def _fits(self, state: Sequence[mx.array]) -> bool:
        return len(state) == len(self._parts) and all(
            array.shape == part.shape and array.dtype == part.dtype
            for array, part in zip(state, self._parts, strict=True)
        )


class RecurrentCache(WholeState):
    """The last inputs of a causal convolution `[1, tail, channels]` and a recurrent state `[1, *shape]` in float32.

    The tail holds inputs before the activation, in the dtype of the activations. The recurrent state is float32
    whatever the model's dtype is, also in snapshots: in 16 bits it drifts with the length of the text.
    """

    def __init__(self, tail: int, channels: int, conv_dtype: mx.Dtype, state_shape: Sequence[int]) -> None:
        super().__init__(
            (
                Part("convolution tail", (1, tail, channels), conv_dtype),
                Part("recurrent state", (1, *state_shape), mx.float32),
            )
        )


class NGramCache(WholeState):
    """The last `context` token ids `[context]` int32 and a convolution tail `[1, tail, channels]`.

    `before` is the id that stands for positions before the first token. For n-grams of n tokens, `context` is n − 1.
    """

    def __init__(self, context: int, before: int, tail: int, channels: int, conv_dtype: mx.Dtype) -> None:
        super().__init__(
            (
                Part("token ids", (context,), mx.int32, before),
                Part("convolution tail", (1, tail, channels), conv_dtype),
            )
        )
        self._before = np.full(context, before, np.int32)
        self._known: tuple[mx.array, np.ndarray] | None = None

    def get(self) -> tuple[mx.array, ...]:
        empty = self._arrays is None
        arrays = super().get()
        if empty:
            self._known = (arrays[0], self._before)
        return arrays

    def context(self) -> np.ndarray:
        """The last token ids on the host.

        Reading them back from the device would wait for all that it has been given to do, so the host keeps what it
        was told with `put_ids`; only after a restore are they read.
        """
        ids = self.get()[0]
        if self._known is None or self._known[0] is not ids:
            self._known = (ids, np.array(ids))
        return self._known[1]

    def put_ids(self, contexts: Sequence[np.ndarray], tails: Sequence[mx.array], length: int) -> None:
        """As `put`, from ids int32 `[context]` that the host knows."""
        states = [(mx.array(ids), tail) for ids, tail in zip(contexts, tails, strict=True)]
        self.put(states, length)
        self._known = (self.get()[0], contexts[-1])
