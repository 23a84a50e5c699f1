"""Keys and values of every position: full attention, latent attention, index keys."""

from __future__ import annotations

from arriero.model.contract import Snapshot
from arriero.runner.caches.linear import LinearCache, range_snapshot
from arriero.runner.caches.snapshot import RangeSnapshot, dispatch, owned


class KVCache(LinearCache):
    """All positions `[0, offset)`; `append` returns all of them, with base 0. `value_dim` 0 is legal."""

    def rewind(self, offset: int, snapshot: Snapshot | None = None) -> bool:
        if not 0 <= offset <= self._offset:
            return False
        if offset < self._offset:
            self._schedule.abandon()
            self._offset = offset
        return True

    def snapshot(self, start: int = 0) -> RangeSnapshot | None:
        return self.lazy(start, self._offset)

    def restore(self, snapshot: Snapshot, offset: int | None = None) -> bool:
        stored = range_snapshot(snapshot)
        target = stored.end if offset is None else offset
        if not 0 <= target <= stored.end or self._offset < stored.start or not self._fits(stored):
            return False
        self._schedule.abandon()
        if stored.owner is not self and target > stored.start:
            count = target - stored.start
            keys, values = (array[..., :count, :] for array in stored.arrays())
            self._write(keys, values, stored.start, target)
            if stored.lazy:  # the copy must be under way before the other row writes into the buffer that it reads
                dispatch(*self.state())
        self._offset = target
        return True

    def split(self, snapshot: Snapshot, at: int) -> tuple[Snapshot | None, Snapshot | None]:
        stored = range_snapshot(snapshot)
        if at <= stored.start:
            return None, stored
        if at >= stored.end:
            return stored, None
        if stored.owner is not None:
            return stored.owner.lazy(stored.start, at), stored.owner.lazy(at, stored.end)
        count = at - stored.start
        keys, values = stored.arrays()
        head = owned(stored.start, at, [keys[..., :count, :]], [values[..., :count, :]])
        return head, owned(at, stored.end, [keys[..., count:, :]], [values[..., count:, :]])

    def merge(self, parent: Snapshot | None, child: Snapshot | None) -> Snapshot | None:
        """`[a, b)` and `[b, c)` as one; None when either is missing, since the rest spans no whole edge."""
        if parent is None or child is None:
            return None
        first, second = range_snapshot(parent), range_snapshot(child)
        if first.end != second.start:
            raise ValueError(
                f"[{first.start}, {first.end}) and [{second.start}, {second.end}) do not meet and can't be merged"
            )
        if first.owner is not None and first.owner is second.owner:
            return first.owner.lazy(first.start, second.end)
        keys, values = zip(first.arrays(), second.arrays(), strict=True)
        return owned(first.start, second.end, keys, values)

    def _first_for(self, position: int) -> int:
        return 0

    def _base_for(self, offset: int) -> int:
        return 0

    def _capture(self, start: int, offset: int) -> RangeSnapshot | None:
        return self.lazy(start, offset)
