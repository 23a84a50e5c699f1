"""What the caches of keys and values share: one buffer in logical order, lazy snapshots of it, and captures."""

from __future__ import annotations

import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence

import mlx.core as mx

from arriero.kernels import device
from arriero.kernels.append import append
from arriero.model.contract import Snapshot
from arriero.runner.caches.schedule import Schedule
from arriero.runner.caches.snapshot import RangeSnapshot, dispatch, fresh

STEP = 256
"""The multiple that every base and every buffer's size is of."""


def ceil_step(positions: int) -> int:
    """The least multiple of STEP that is at least `positions`."""
    return -(-positions // STEP) * STEP


def floor_step(positions: int) -> int:
    """The greatest multiple of STEP that is at most `positions`, and at least 0."""
    return max(0, positions) // STEP * STEP


def growth() -> tuple[int, int]:
    """Positions by which caches of all positions grow, a multiple of STEP, and how many more than asked for they take.

    On NVIDIA GPUs steps are recorded for buffers of one size (`model/layers/replay.py`): 10 ms for each new one (H200).
    """
    return (STEP, 0) if device.cuda() is None else (4 * STEP, STEP)


def grown(positions: int) -> int:
    """What the buffers of such a cache hold of so many positions and those that it takes besides."""
    step, ahead = growth()
    return -(-(positions + ahead) // step) * step


class LinearCache(ABC):
    """Keys and values of one layer of one row, `[1, heads, positions, dim]`, positions in order.

    Slot 0 of the buffers is position `base`, a multiple of STEP. Writes may happen in place (`append`), so every lazy
    snapshot that a write or a trim touches is copied out first, and the copy is dispatched before the write is built.
    An array returned by `append` or `view` must be consumed (evaluated, or part of a graph that is) before the cache is
    rewound and written again.
    """

    def __init__(self, kv_heads: int, key_dim: int, value_dim: int, dtype: mx.Dtype) -> None:
        self._kv_heads = kv_heads
        self._key_dim = key_dim
        self._value_dim = value_dim
        self._dtype = dtype
        self._keys: mx.array | None = None
        self._values: mx.array | None = None
        self._base = 0
        self._capacity = 0
        self._offset = 0
        self._written: mx.array | None = None
        """What is computed once writes into the buffers' own memory have happened (`commit_in_place`)."""
        self._schedule = Schedule()
        self._lazy: dict[int, weakref.ref[RangeSnapshot]] = {}
        self._lazy_end = 0
        """Where the furthest of them ended: no write behind it touches one."""
        self._spare_from = sys.maxsize
        """Offset from which on a write moves the base forward though the buffers are not full."""

    @property
    def offset(self) -> int:
        return self._offset

    @property
    def base(self) -> int:
        """Position of the first slot of the buffers."""
        return self._base

    @property
    def room(self) -> int:
        """Positions that can be written before the buffers grow or move."""
        return self._base + self._capacity - self._offset

    @property
    def written(self) -> mx.array | None:
        """What is computed once the last write in place has happened; None where the buffers themselves say so."""
        return self._written

    @property
    def layout(self) -> tuple[int, int]:
        """The base, and how many positions the buffers hold."""
        return self._base, self._capacity

    @property
    def nbytes(self) -> int:
        if self._keys is None or self._values is None:
            return 0
        return self._keys.nbytes + self._values.nbytes

    def state(self) -> list[mx.array]:
        self._settle()
        return [] if self._keys is None or self._values is None else [self._keys, self._values]

    def append(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array, int]:
        """Write the next L positions and return what their queries may look at.

        `keys` is `[1, kv_heads, L, key_dim]`, `values` `[1, kv_heads, L, value_dim]`, both of the cache's dtype.
        Returns keys and values of positions `[first, offset)` in order, and `first`, a multiple of STEP. Raises
        ValueError for another shape or dtype.
        """
        length = keys.shape[2] if keys.ndim == 4 else 0
        self._check(keys, values, length)
        start, end = self._offset, self._offset + length
        self._write(keys, values, start, end)
        self._cross()
        first = self._first_for(start)
        return *self.range(first, end), first

    def reserve(self, length: int) -> tuple[mx.array, mx.array, int]:
        """Room for the next `length` positions: the whole buffers, and the position of their first slot.

        For a kernel that writes keys and values itself: it hands what it made of the buffers to `commit`, and nobody
        uses these arrays afterwards.
        """
        self._settle()
        return self.reserve_in_place(length)

    def reserve_in_place(self, length: int) -> tuple[mx.array, mx.array, int]:
        """As `reserve`, for a kernel that writes into the buffers' own memory and is launched after the one before."""
        # Most steps need nothing of it, and each asks every cache of every row.
        start, end = self._offset, self._offset + length
        if start < self._lazy_end or end - self._base > self._capacity or start >= self._spare_from:
            self._make_room(start, end)
        assert self._keys is not None
        assert self._values is not None
        return self._keys, self._values, self._base

    def still_in_place(self, length: int, layout: tuple[int, int]) -> tuple[mx.array, mx.array] | None:
        """The buffers that `reserve_in_place` gives, where they are laid out so already and nothing is to be done.

        None elsewhere: most steps ask every cache of every row for no more than this.
        """
        offset, base = self._offset, self._base
        room = base + self._capacity - length
        if not self._lazy_end <= offset <= room or offset >= self._spare_from or layout != (base, self._capacity):
            return None
        assert self._keys is not None
        assert self._values is not None
        return self._keys, self._values

    def commit_in_place(self, length: int, written: mx.array) -> None:
        """Say that computing `written` writes `length` more positions into the buffers of `reserve_in_place`.

        Whoever reads the buffers next gets arrays that depend on it.
        """
        self._written = written
        self._offset += length
        if self._schedule.waiting:
            self._schedule.cross(self._offset, self._capture)

    def _settle(self) -> None:
        """Have the buffers depend on what was written into them."""
        if self._written is not None and self._keys is not None and self._values is not None:
            self._keys, self._values = mx.depends([self._keys, self._values], [self._written])
        self._written = None

    def commit(self, keys: mx.array, values: mx.array, length: int) -> None:
        """Take over the buffers of `reserve` with `length` more positions in them."""
        self._keys, self._values = keys, values
        self._offset += length
        self._cross()

    def view(self, position: int | None = None) -> tuple[mx.array, mx.array, int]:
        """What queries from `position` on (default: the last) may look at, without a write.

        Returns keys, values and the position of the first, just as the `append` at `position` returned them.
        """
        first = max(self._base, self._first_for(self._offset - 1 if position is None else position))
        return *self.range(first, self._offset), first

    def range(self, start: int, end: int) -> tuple[mx.array, mx.array]:
        """Views of the live buffers over positions `[start, end)`."""
        self._settle()
        if self._keys is None or self._values is None:
            shape = (1, self._kv_heads, 0)
            return mx.zeros((*shape, self._key_dim), self._dtype), mx.zeros((*shape, self._value_dim), self._dtype)
        low, high = start - self._base, end - self._base
        return self._keys[..., low:high, :], self._values[..., low:high, :]

    def plan(self, offsets: Sequence[int]) -> None:
        self._schedule.plan(offsets, self._offset)
        self._schedule.cross(self._offset, self._capture)

    def take(self) -> list[Snapshot | None]:
        return self._schedule.take()

    def free(self) -> None:
        self._reset()
        self._schedule.take()

    def copy_out(self, snapshots: Sequence[RangeSnapshot]) -> None:
        """Give these lazy snapshots of this cache compact arrays of their own, dispatched before any later write."""
        if not snapshots:
            return
        copies = [tuple(fresh([array], axis=2) for array in snapshot.arrays()) for snapshot in snapshots]
        dispatch(*(array for pair in copies for array in pair))
        for snapshot, (keys, values) in zip(snapshots, copies, strict=True):
            snapshot.adopt(keys, values)
            self._lazy.pop(id(snapshot), None)
        for snapshot in snapshots:
            snapshot.announce()

    def vacate(self, start: int) -> None:
        """Copy out everything lazy that reaches behind position `start`, where other positions are about to come."""
        self._protect(start, self._base + self._capacity)

    @abstractmethod
    def rewind(self, offset: int, snapshot: Snapshot | None = None) -> bool: ...

    @abstractmethod
    def restore(self, snapshot: Snapshot, offset: int | None = None) -> bool: ...

    @abstractmethod
    def _first_for(self, position: int) -> int:
        """The first position, a multiple of STEP, that the query at `position` may need."""

    @abstractmethod
    def _base_for(self, offset: int) -> int:
        """The base that new buffers get when positions from `offset` on are about to be written."""

    def _capacity_for(self, positions: int) -> int:
        """What new buffers hold when they must hold at least so many."""
        return grown(positions)

    @abstractmethod
    def _capture(self, start: int, offset: int) -> RangeSnapshot | None:
        """The snapshot for a planned offset, the previous capture being at `start`."""

    def lazy(self, start: int, end: int) -> RangeSnapshot | None:
        """A lazy snapshot of `[start, end)`; None when empty."""
        if start >= end:
            return None
        snapshot = RangeSnapshot(start, end, owner=self)
        key, alive = id(snapshot), self._lazy
        self._lazy_end = max(self._lazy_end, end)

        def forget(_: weakref.ref[RangeSnapshot]) -> None:
            alive.pop(key, None)

        alive[key] = weakref.ref(snapshot, forget)
        return snapshot

    def _lazy_snapshots(self) -> list[RangeSnapshot]:
        return [snapshot for reference in list(self._lazy.values()) if (snapshot := reference()) is not None]

    def _write(self, keys: mx.array, values: mx.array, start: int, end: int) -> None:
        """Put positions `[start, end)` into the buffers, after copying out what that overwrites; sets the offset."""
        self._settle()
        self._make_room(start, end)
        assert self._keys is not None
        assert self._values is not None
        self._keys = append(self._keys, keys, start - self._base)
        if self._value_dim:
            self._values = append(self._values, values, start - self._base)
        self._offset = end

    def _make_room(self, start: int, end: int) -> None:
        """Copy out what a write of `[start, end)` would overwrite, and have buffers that it fits."""
        if start < self._lazy_end:
            self._protect(start, end)
        if end - self._base > self._capacity or start >= self._spare_from:
            self._move(start, end)

    def _cross(self) -> None:
        if self._schedule:
            self._schedule.cross(self._offset, self._capture)

    def _protect(self, start: int, end: int) -> None:
        """Copy out every lazy snapshot that overlaps `[start, end)`.

        On every write, not only the first after a rewind: a long refill reaches further snapshots with each step. A
        hook of a copied snapshot may make new ones, hence the loop.
        """
        while touched := [s for s in self._lazy_snapshots() if s.start < end and s.end > start]:
            self.copy_out(touched)

    def _move(self, start: int, end: int) -> None:
        """New buffers with room up to `end`, holding `[base, start)`; the base moves forward if the kind allows it."""
        base = self._base_for(start)
        self._protect(0, base)
        kept = start - base
        capacity = self._capacity_for(end - base)
        keys, values = self.range(base, start) if kept else (None, None)
        self._keys = self._filled(keys, self._key_dim, capacity - kept)
        self._values = self._filled(values, self._value_dim, capacity - kept)
        self._base = base
        self._capacity = capacity

    def _filled(self, kept: mx.array | None, dim: int, free: int) -> mx.array:
        space = mx.zeros((1, self._kv_heads, free, dim), self._dtype)
        return space if kept is None else mx.concatenate([kept, space], axis=2)

    def _reset(self) -> None:
        """Back to an empty cache; lazy snapshots are copied out first."""
        while lazy := self._lazy_snapshots():
            self.copy_out(lazy)
        self._keys = self._values = self._written = None
        self._base = self._capacity = self._offset = 0

    def _check(self, keys: mx.array, values: mx.array, length: int) -> None:
        expected = ((1, self._kv_heads, length, self._key_dim), (1, self._kv_heads, length, self._value_dim))
        if length < 1 or keys.shape != expected[0] or values.shape != expected[1]:
            raise ValueError(
                f"append of keys {keys.shape} and values {values.shape} to a cache of {self._kv_heads} heads of "
                f"{self._key_dim} and {self._value_dim}; expected [1, heads, positions ≥ 1, dim]"
            )
        if keys.dtype != self._dtype or values.dtype != self._dtype:
            raise ValueError(f"append of {keys.dtype} keys and {values.dtype} values to a cache of {self._dtype}")

    def _fits(self, snapshot: RangeSnapshot) -> bool:
        """Whether the snapshot is of a cache with these heads, dims and dtype."""
        if snapshot.owner is self:
            return True
        keys, values = snapshot.arrays()
        return (
            keys.dtype == self._dtype
            and keys.shape[1] == self._kv_heads
            and keys.shape[3] == self._key_dim
            and values.shape[3] == self._value_dim
        )


def range_snapshot(snapshot: Snapshot) -> RangeSnapshot:
    """The snapshot as what caches of keys and values make; raises TypeError for another cache kind's."""
    if not isinstance(snapshot, RangeSnapshot):
        raise TypeError(f"a {type(snapshot).__name__} is not a snapshot of keys and values")
    return snapshot
