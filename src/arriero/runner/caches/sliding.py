"""Keys and values of the last positions: sliding-window attention."""

from __future__ import annotations

import mlx.core as mx

from arriero.model.contract import Snapshot
from arriero.runner.caches.linear import STEP, LinearCache, ceil_step, floor_step, range_snapshot
from arriero.runner.caches.snapshot import RangeSnapshot


class SlidingCache(LinearCache):
    """Positions of a window that a query at `p` sees as `(p − window, p]`, in logical order; not a ring.

    The buffers hold `[base, offset)` and move forward, by a copy, only when they are full; so the copy of one window is
    paid every STEP decode steps. After a chunk of L positions at most `window + L + 2·STEP` are held, and from the next
    write on no more than `window + 2·STEP` beside its own, which is what a row reserves. A rewind reaches every offset
    whose window is still held; that includes every offset from the last write's start on.

    `append` returns keys from the last multiple of STEP that its first query can see, whatever is held before: what a
    kernel reads depends on positions alone and not on how they arrived.
    """

    def __init__(self, kv_heads: int, key_dim: int, value_dim: int, dtype: mx.Dtype, window: int) -> None:
        if window < 1:
            raise ValueError(f"a sliding window holds at least one position; got {window}")
        super().__init__(kv_heads, key_dim, value_dim, dtype)
        self._window = window
        self._oldest = 0
        """The first position whose data is real; slots between the base and it are zeros after a restore."""
        self._slack_from_base()

    @property
    def window(self) -> int:
        return self._window

    @property
    def oldest(self) -> int:
        """The first position that is held."""
        return self._oldest

    def rewind(self, offset: int, snapshot: Snapshot | None = None) -> bool:
        if not 0 <= offset <= self._offset:
            return False
        if offset == self._offset:
            return True
        # A window of one position needs none before it, but what is captured there must hold something.
        if offset - max(self._window, 2) + 1 >= self._oldest or self._oldest == 0:
            self._schedule.abandon()
            self._offset = offset
            return True
        if offset == 0:
            self._schedule.abandon()
            self._reset()
            return True
        return snapshot is not None and snapshot.end == offset and self.restore(snapshot)

    def snapshot(self, start: int = 0) -> RangeSnapshot | None:
        """The window that ends at the offset, whatever `start` is; None when nothing was written after `start`."""
        return None if self._offset <= start else self._capture(start, self._offset)

    def restore(self, snapshot: Snapshot, offset: int | None = None) -> bool:
        """Continue from a window; `offset` may be earlier than its end only while the window there is whole in it."""
        stored = range_snapshot(snapshot)
        target = stored.end if offset is None else offset
        whole = stored.start == 0 or target - max(self._window, 2) + 1 >= stored.start
        if not 0 <= target <= stored.end or not whole or not self._fits(stored):
            return False
        self._schedule.abandon()
        if stored.owner is self:
            self._offset = target
        elif target == 0:
            self._reset()
        else:
            self._load(stored, target)
        return True

    def split(self, snapshot: Snapshot, at: int) -> tuple[Snapshot | None, Snapshot | None]:
        """A window is one whole state: it stays with its end."""
        return None, range_snapshot(snapshot)

    def merge(self, parent: Snapshot | None, child: Snapshot | None) -> Snapshot | None:
        """The child's window stands for both."""
        return child

    def _load(self, stored: RangeSnapshot, target: int) -> None:
        """Replace the buffers by the stored positions up to `target`."""
        stored.own()
        self._reset()
        base = floor_step(stored.start)
        before, after = stored.start - base, ceil_step(target - base) - (target - base)
        kept = tuple(array[..., : target - stored.start, :] for array in stored.arrays())
        self._keys, self._values = (
            mx.concatenate(
                [
                    mx.zeros((1, self._kv_heads, before, array.shape[3]), self._dtype),
                    array,
                    mx.zeros((1, self._kv_heads, after, array.shape[3]), self._dtype),
                ],
                axis=2,
            )
            for array in kept
        )
        self._base, self._capacity = base, before + target - stored.start + after
        self._oldest, self._offset = stored.start, target
        self._slack_from_base()

    def _reset(self) -> None:
        super()._reset()
        self._oldest = 0
        self._slack_from_base()

    def _move(self, start: int, end: int) -> None:
        super()._move(start, end)
        self._oldest = max(self._oldest, self._base)
        self._slack_from_base()

    def _slack_from_base(self) -> None:
        """Behind a long chunk more than the usual slack is held of what nobody can see any more."""
        self._spare_from = self._base + self._window + 3 * STEP

    def _first_for(self, position: int) -> int:
        return floor_step(position - self._window + 1)

    def _capacity_for(self, positions: int) -> int:
        return ceil_step(positions)

    def _base_for(self, offset: int) -> int:
        # One position more than a query at `offset` needs: a rewind by one then still finds its whole window.
        return max(self._base, floor_step(offset - self._window))

    def _capture(self, start: int, offset: int) -> RangeSnapshot | None:
        return self.lazy(max(self._oldest, offset - self._window), offset)
