"""One node of the prefix trie: an edge of keys and what each cache held over it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from arriero.model.contract import Cache, RowCaches, Snapshot
from arriero.runner.caches import KVCache
from arriero.runner.prefix.keys import Keys

Snapshots = list["Snapshot | None"]
"""One per cache slot; None where nothing was captured, and for stateless layers."""


class Node:
    """Positions `[start, end)` of every prompt that passes here.

    A snapshot of a cache that holds every position spans exactly the edge; one of a whole state, or of a window, stands
    at `end`. Children begin with different keys.
    """

    __slots__ = ("children", "end", "keys", "last_used", "parent", "snapshots", "start")

    def __init__(self, parent: Node | None, keys: Keys, start: int, slots: int) -> None:
        self.parent = parent
        self.keys = keys
        self.start = start
        self.end = start + len(keys)
        self.children: dict[int, Node] = {}
        self.snapshots: Snapshots = [None] * slots
        self.last_used = 0

    @property
    def nbytes(self) -> int:
        """Bytes that its snapshots own; lazy ones own none."""
        return sum(snapshot.nbytes for snapshot in self.snapshots if snapshot is not None)

    @property
    def path(self) -> list[Node]:
        """The nodes from below the root down to this one."""
        nodes: list[Node] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def grow(self, keys: Keys) -> Node:
        """A new child for these keys; nothing is ever added to an edge that has snapshots."""
        child = Node(self, keys, self.end, len(self.snapshots))
        child.last_used = self.last_used
        self.children[int(keys[0])] = child
        return child

    def split(self, at: int, kinds: RowCaches) -> Node:
        """Divide the edge at position `at`; returns the new upper half, whose only child this node becomes."""
        assert self.parent is not None
        count = at - self.start
        upper = Node(self.parent, self.keys[:count], self.start, len(self.snapshots))
        upper.last_used = self.last_used
        self.parent.children[int(self.keys[0])] = upper
        upper.children[int(self.keys[count])] = self
        for slot, (kind, snapshot) in enumerate(zip(kinds, self.snapshots, strict=True)):
            if kind is not None and snapshot is not None:
                upper.snapshots[slot], self.snapshots[slot] = kind.split(snapshot, at)
        self.parent, self.keys, self.start = upper, self.keys[count:], at
        return upper

    def absorb(self, kinds: RowCaches) -> None:
        """Take over the edge of the parent, of which this is the only child."""
        parent = self.parent
        assert parent is not None
        assert parent.parent is not None
        assert len(parent.children) == 1
        for slot, kind in enumerate(kinds):
            if kind is not None:
                self.snapshots[slot] = kind.merge(parent.snapshots[slot], self.snapshots[slot])
        self.keys = np.concatenate([parent.keys, self.keys])
        self.start = parent.start
        self.parent = parent.parent
        self.parent.children[int(self.keys[0])] = self


def keeps_every_position(cache: Cache | None) -> bool:
    """Whether the cache holds all positions, so that any stretch of it can be stored and any offset reached."""
    return isinstance(cache, KVCache)


def owners(snapshots: Sequence[Snapshot | None]) -> list[object]:
    """The live caches that the snapshots still share memory with."""
    found = [getattr(snapshot, "owner", None) for snapshot in snapshots]
    return [owner for owner in found if owner is not None]
