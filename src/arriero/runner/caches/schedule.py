"""Which offsets a cache has been asked to capture, and what was captured so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from arriero.model.contract import Snapshot

Capture = Callable[[int, int], Snapshot | None]
"""`capture(start, offset)`: a snapshot of `[start, offset)`, or None when there is nothing to hold."""


class Schedule:
    """The planned offsets of one cache, with the cursor that makes captures line up end to end.

    A capture at `o` covers `[cursor, o)` and moves the cursor to `o`. The cursor starts at the offset current when the
    plan was made and never moves at an ordinary write boundary, so captures match the edges that they were planned for.
    """

    __slots__ = ("_captured", "_cursor", "_next", "_offsets", "waiting")

    def __init__(self) -> None:
        self._offsets: list[int] = []
        self._captured: list[Snapshot | None] = []
        self._next = 0
        self._cursor = 0
        self.waiting = False
        """Whether an offset is still to be crossed: asked of every cache at every step."""

    def __bool__(self) -> bool:
        """Whether an offset is still to be crossed."""
        return self.waiting

    @property
    def captured(self) -> list[Snapshot | None]:
        """What was captured and not taken yet, in the order of the plan."""
        return self._captured

    def plan(self, offsets: Sequence[int], position: int) -> None:
        """Schedule captures at `offsets`, seen from `position`; raises ValueError as `Cache.plan` says."""
        if self._offsets:
            raise ValueError(
                f"captures at {self._offsets} are planned and were not taken; take() before planning {list(offsets)}"
            )
        planned = list(offsets)
        if planned and planned[0] < position:
            raise ValueError(f"capture planned at {planned[0]}, but the cache already holds {position} positions")
        if any(later <= earlier for earlier, later in pairwise(planned)):
            raise ValueError(f"capture offsets must ascend without repeats; got {planned}")
        self._offsets = planned
        self._captured = [None] * len(planned)
        self._next = 0
        self._cursor = position
        self.waiting = bool(planned)

    def cross(self, end: int, capture: Capture) -> None:
        """Capture at every planned offset up to and including `end`."""
        while self._next < len(self._offsets) and self._offsets[self._next] <= end:
            offset = self._offsets[self._next]
            self._captured[self._next] = capture(self._cursor, offset)
            self._cursor = offset
            self._next += 1
            self.waiting = self._next < len(self._offsets)

    def interior(self, position: int, length: int) -> list[int]:
        """Planned offsets strictly inside `(position, position + length)`, relative to `position`."""
        return [o - position for o in self._offsets[self._next :] if position < o < position + length]

    def abandon(self) -> None:
        """Give up on offsets that were not crossed: after a rewind they would join two histories."""
        self._next = len(self._offsets)
        self.waiting = False

    def take(self) -> list[Snapshot | None]:
        """What was captured, one entry per planned offset; the schedule is empty afterwards."""
        captured = self._captured
        self._offsets, self._captured, self._next = [], [], 0
        self.waiting = False
        return captured
