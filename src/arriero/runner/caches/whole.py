"""What caches share whose snapshots are one whole state: captures on schedule, and no dividing or joining."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

from arriero.model.contract import Snapshot
from arriero.runner.caches.schedule import Schedule
from arriero.runner.caches.snapshot import WholeSnapshot

S = TypeVar("S", bound=WholeSnapshot)


class WholeCache(ABC, Generic[S]):
    """A memory that can be captured only where a write ends, as a snapshot of type S."""

    def __init__(self) -> None:
        self._offset = 0
        self._schedule = Schedule()

    @property
    def offset(self) -> int:
        return self._offset

    def plan(self, offsets: Sequence[int]) -> None:
        self._schedule.plan(offsets, self._offset)
        self._schedule.cross(self._offset, self._capture)

    def take(self) -> list[Snapshot | None]:
        return self._schedule.take()

    def snapshot(self, start: int = 0) -> S | None:
        """The state at the offset, in memory of its own; None when nothing was written after `start`."""
        if self._offset <= start:
            return None
        snapshot = self._capture(start, self._offset)
        if snapshot is not None:
            snapshot.own()
        return snapshot

    def rewind(self, offset: int, snapshot: Snapshot | None = None) -> bool:
        """Back to `offset`: where it is already, to the start, by dropping positions, or to where the snapshot ends."""
        if not 0 <= offset <= self._offset:
            return False
        if offset == self._offset:
            return True
        if offset == 0:
            self._schedule.abandon()
            self._clear()
            return True
        if self._drop(self._offset - offset):
            self._schedule.abandon()
            self._offset = offset
            return True
        return snapshot is not None and self.restore(snapshot, offset)

    @abstractmethod
    def restore(self, snapshot: Snapshot, offset: int | None = None) -> bool: ...

    def split(self, snapshot: Snapshot, at: int) -> tuple[Snapshot | None, Snapshot | None]:
        """A whole state stays with its end."""
        return None, snapshot

    def merge(self, parent: Snapshot | None, child: Snapshot | None) -> Snapshot | None:
        """The child's state stands for both."""
        return child

    def free(self) -> None:
        self._clear()
        self._schedule.take()

    def _drop(self, count: int) -> bool:
        """Forget the last `count` positions without a snapshot; False, and unchanged, where that can't be."""
        return False

    @abstractmethod
    def _clear(self) -> None:
        """Be empty, at offset 0."""

    @abstractmethod
    def _capture(self, start: int, offset: int) -> S | None:
        """The snapshot for a planned offset, the previous capture being at `start`."""
