"""One node of the prefix trie: an edge of keys and what each cache held over it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from arriero.model.contract import Cache, RowCaches, Snapshot
from arriero.runner.caches import KVCache, RangeSnapshot
from arriero.runner.prefix.keys import Keys

if TYPE_CHECKING:
    from arriero.runner.prefix.trie import Rest

Snapshots = list["Snapshot | None"]
"""One per cache slot; None where nothing was captured, and for stateless layers."""


@dataclass(slots=True)
class Ledger:
    """What all nodes of a trie hold together, kept up to date by each, since adding it up takes long."""

    kinds: RowCaches
    nbytes: int = 0
    """Bytes that snapshots own."""
    nodes: int = 0


class Node:
    """Positions `[start, end)` of every prompt that passes here.

    A snapshot of a cache that holds every position spans exactly the edge; one of a whole state, or of a window, stands
    at `end`. Children begin with different keys. Whoever changes `snapshots` calls `recount` afterwards.
    """

    __slots__ = (
        "children",
        "end",
        "keys",
        "last_used",
        "ledger",
        "nbytes",
        "parent",
        "restorable",
        "rests",
        "snapshots",
        "start",
    )

    def __init__(self, parent: Node | None, keys: Keys, start: int, ledger: Ledger) -> None:
        self.parent = parent
        self.ledger = ledger
        self.keys = keys
        self.start = start
        self.end = start + len(keys)
        self.children: dict[int, Node] = {}
        self.snapshots: Snapshots = [None] * len(ledger.kinds)
        self.nbytes = 0
        """Bytes that its snapshots own; lazy ones own none."""
        self.restorable = False
        """Whether it holds a state that no other node can give."""
        self.rests: list[Rest] = []
        """Caches that rest at its end."""
        self.last_used = 0
        ledger.nodes += parent is not None

    def recount(self, _: int = 0) -> None:
        """Bring `nbytes`, `restorable` and the ledger up to date; lazy snapshots call it when they own bytes."""
        nbytes, restorable = 0, False
        for kind, snapshot in zip(self.ledger.kinds, self.snapshots, strict=True):
            if snapshot is None:
                continue
            restorable = restorable or not keeps_every_position(kind)
            if isinstance(snapshot, RangeSnapshot) and snapshot.lazy:
                snapshot.on_own = self.recount
            else:
                nbytes += snapshot.nbytes
        self.ledger.nbytes += nbytes - self.nbytes
        self.nbytes, self.restorable = nbytes, restorable

    def drop(self) -> None:
        """Let go of everything: the node is no longer part of the trie."""
        self.snapshots = [None] * len(self.snapshots)
        self.recount()
        self.children = {}
        self.parent = None
        self.ledger.nodes -= 1

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
        child = Node(self, keys, self.end, self.ledger)
        child.last_used = self.last_used
        self.children[int(keys[0])] = child
        return child

    def split(self, at: int) -> Node:
        """Divide the edge at position `at`; returns the new upper half, whose only child this node becomes."""
        assert self.parent is not None
        count = at - self.start
        upper = Node(self.parent, self.keys[:count], self.start, self.ledger)
        upper.last_used = self.last_used
        self.parent.children[int(self.keys[0])] = upper
        upper.children[int(self.keys[count])] = self
        for slot, (kind, snapshot) in enumerate(zip(self.ledger.kinds, self.snapshots, strict=True)):
            if kind is not None and snapshot is not None:
                upper.snapshots[slot], self.snapshots[slot] = kind.split(snapshot, at)
        self.parent, self.keys, self.start = upper, self.keys[count:], at
        upper.recount()
        self.recount()
        return upper

    def absorb(self) -> None:
        """Take over the edge of the parent, of which this is the only child."""
        parent = self.parent
        assert parent is not None
        assert parent.parent is not None
        assert len(parent.children) == 1
        for slot, kind in enumerate(self.ledger.kinds):
            if kind is not None:
                self.snapshots[slot] = kind.merge(parent.snapshots[slot], self.snapshots[slot])
        self.keys = np.concatenate([parent.keys, self.keys])
        self.start = parent.start
        self.parent = parent.parent
        self.parent.children[int(self.keys[0])] = self
        parent.drop()
        self.recount()


def keeps_every_position(cache: Cache | None) -> bool:
    """Whether the cache holds all positions, so that any stretch of it can be stored and any offset reached."""
    return isinstance(cache, KVCache)


def owners(snapshots: Sequence[Snapshot | None]) -> list[object]:
    """The live caches that the snapshots still share memory with."""
    found = [getattr(snapshot, "owner", None) for snapshot in snapshots]
    return [owner for owner in found if owner is not None]
