"""Immutable copies of what a cache held: a range of positions, or one whole state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from arriero.runner.caches.linear import LinearCache


def fresh(pieces: Sequence[mx.array], axis: int) -> mx.array:
    """The pieces joined along `axis` in memory of their own, even when there is one piece or it fills its buffer.

    Neither a slice nor `mx.contiguous` is enough: both may share the parent's memory, which would pin it and, with an
    append in place, change under the snapshot. A concatenation of two always allocates, so an empty one is added.
    """
    shape = list(pieces[0].shape)
    shape[axis] = 0
    return mx.concatenate([*pieces, mx.zeros(shape, pieces[0].dtype)], axis=axis)


def dispatch(*arrays: mx.array) -> None:
    """Start computing the arrays now, without waiting: before anything that is built later on the same stream."""
    mx.async_eval(*arrays)  # type: ignore[no-untyped-call]


class RangeSnapshot:
    """Keys and values of positions `[start, end)`: a range of a live buffer (lazy) or arrays of its own.

    A lazy snapshot holds no array, only the range, so that it never keeps the buffer from being updated in place. The
    cache copies it out before a write or a trim touches the range.
    """

    __slots__ = ("__weakref__", "_end", "_keys", "_owner", "_start", "_values", "on_own")

    def __init__(
        self,
        start: int,
        end: int,
        owner: LinearCache | None = None,
        arrays: tuple[mx.array, mx.array] | None = None,
    ) -> None:
        if (owner is None) == (arrays is None):
            raise ValueError("a range snapshot is either lazy (owner) or owned (arrays)")
        self._start = start
        self._end = end
        self._owner = owner
        self._keys: mx.array | None = arrays[0] if arrays is not None else None
        self._values: mx.array | None = arrays[1] if arrays is not None else None
        self.on_own: Callable[[int], None] | None = None
        """Called once with the bytes when a lazy snapshot becomes owned."""

    @property
    def start(self) -> int:
        return self._start

    @property
    def end(self) -> int:
        return self._end

    @property
    def lazy(self) -> bool:
        """Whether the data is still in the owner's live buffer."""
        return self._owner is not None

    @property
    def owner(self) -> LinearCache | None:
        """The cache whose buffer holds the data while this is lazy."""
        return self._owner

    @property
    def nbytes(self) -> int:
        """Bytes that this snapshot owns; 0 while it is lazy."""
        if self._keys is None or self._values is None:
            return 0
        return self._keys.nbytes + self._values.nbytes

    def arrays(self) -> tuple[mx.array, mx.array]:
        """Keys and values `[1, heads, end − start, dim]`; views of the live buffer while lazy: use at once."""
        if self._owner is not None:
            return self._owner.range(self._start, self._end)
        assert self._keys is not None
        assert self._values is not None
        return self._keys, self._values

    def own(self) -> None:
        """Copy out of the live buffer (idempotent)."""
        if self._owner is not None:
            self._owner.copy_out([self])

    def adopt(self, keys: mx.array, values: mx.array) -> None:
        """Become owned with these arrays; only the owner calls this, and calls `announce` afterwards."""
        self._owner = None
        self._keys, self._values = keys, values

    def announce(self) -> None:
        """Tell the hook, once, that bytes are owned now."""
        hook, self.on_own = self.on_own, None
        if hook is not None:
            hook(self.nbytes)


def owned(start: int, end: int, keys: Sequence[mx.array], values: Sequence[mx.array]) -> RangeSnapshot:
    """A snapshot of `[start, end)` with memory of its own, made of pieces in order; the copies are under way."""
    arrays = fresh(keys, axis=2), fresh(values, axis=2)
    dispatch(*arrays)
    return RangeSnapshot(start, end, arrays=arrays)


class WholeSnapshot:
    """The arrays of a cache's whole state after `end` positions; they are immutable, so it shares them until `own`."""

    __slots__ = ("__weakref__", "_arrays", "_compact", "_end", "on_own")

    def __init__(self, end: int, arrays: Sequence[mx.array], compact: bool) -> None:
        self._end = end
        self._arrays = tuple(arrays)
        self._compact = compact
        self.on_own: Callable[[int], None] | None = None
        """Never called: the bytes of a whole state count from the start."""

    @property
    def start(self) -> int:
        """0: a whole state stands for everything before `end`."""
        return 0

    @property
    def end(self) -> int:
        return self._end

    @property
    def lazy(self) -> bool:
        return False

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return sum(array.nbytes for array in self._arrays)

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """The state's arrays in the order of the cache."""
        return self._arrays

    @property
    def compact(self) -> bool:
        """Whether the arrays are alone in their memory."""
        return self._compact

    def own(self) -> None:
        """Copy arrays that share other memory, so that they neither pin it nor make a write copy it (idempotent)."""
        if not self._compact:
            self._arrays = copies(self._arrays)
            dispatch(*self._arrays)
            self._compact = True


class StateSnapshot(WholeSnapshot):
    """A whole state that its arrays alone make again."""

    __slots__ = ()


def copies(arrays: Sequence[mx.array]) -> tuple[mx.array, ...]:
    """The arrays in memory of their own; still lazy."""
    return tuple(fresh([array], axis=0) for array in arrays)
