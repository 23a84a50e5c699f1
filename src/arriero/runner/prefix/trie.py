"""The prefix trie: what earlier rows computed, found again by the keys of a new prompt.

Nodes hold immutable snapshots. The caches of a row that has ended **rest** here: they stay the memory of its nodes'
lazy snapshots, so storing a conversation copies nothing, and the next turn takes them over and goes on in place.
Everything stored counts against a budget of bytes; what was used longest ago goes first, a parent never before its
child.

Only the array thread may call it. Refuses to know tokens' text, requests and the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from arriero.model.contract import RowCaches, Snapshot
from arriero.runner.caches.linear import LinearCache
from arriero.runner.prefix.keys import Keys, common
from arriero.runner.prefix.node import Node, keeps_every_position, owners

log = logging.getLogger(__name__)

_EMPTY = np.zeros(0, np.uint64)
_SHOWN = 8
"""Stored keys that a match shows where a prompt differs."""


@dataclass(slots=True)
class Rest:
    """Caches of a row that has ended, at the end of its last node."""

    caches: RowCaches
    leaf: Node

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers that lazy snapshots share; whole states count with their own snapshots."""
        return sum(cache.nbytes for cache in self.caches if cache is not None and isinstance(cache, LinearCache))

    def free(self) -> None:
        """Drop the buffers; snapshots that still share them are copied out first."""
        for cache in self.caches:
            if cache is not None:
                cache.free()
        self.caches = []


@dataclass(frozen=True, slots=True)
class Match:
    """How far a prompt is known."""

    path: list[Node]
    """From below the root; the last node may be matched in part."""
    length: int
    differs: Sequence[int] = ()
    """The first keys that are stored where the prompt goes on otherwise; empty when nothing else is stored there."""


def _joins_freely(first: Snapshot | None, second: Snapshot | None) -> bool:
    """Whether two stretches can become one without a copy."""
    if first is None or second is None:
        return first is second
    both = owners([first, second])
    return len(both) == 2 and both[0] is both[1]


class PrefixTrie:
    """Stored prefixes of one model with one format of caches."""

    def __init__(self, kinds: RowCaches, budget: int) -> None:
        """`kinds` are fresh caches of the model, asked how their snapshots split and merge; `budget` is in bytes."""
        self.kinds = kinds
        self.budget = budget
        self.root = Node(None, _EMPTY, 0, len(kinds))
        self._rests: list[Rest] = []
        self._clock = 0

    @property
    def nbytes(self) -> int:
        """Bytes that are held for later rows."""
        return sum(node.nbytes for node in self.nodes()) + sum(rest.nbytes for rest in self._rests)

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, parents first."""
        waiting = list(self.root.children.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children.values()

    def match(self, keys: Keys) -> Match:
        """The longest stored prefix of `keys`."""
        path: list[Node] = []
        node, at = self.root, 0
        while at < len(keys):
            child = node.children.get(int(keys[at]))
            if child is None:
                others = sorted(node.children.values(), key=lambda child: -child.last_used)
                return Match(path, at, others[0].keys[:_SHOWN].tolist() if others else ())
            same = common(child.keys, keys[at:])
            path.append(child)
            at += same
            if same < len(child.keys):
                return Match(path, at, child.keys[same : same + _SHOWN].tolist() if at < len(keys) else ())
            node = child
        return Match(path, at)

    def touch(self, node: Node) -> None:
        """Make this node the one used last; those on the way to it keep their age and may go before it does not."""
        self._clock += 1
        node.last_used = self._clock

    def advance(self, keys: Keys) -> list[Node]:
        """The path whose last node ends exactly where `keys` do: an edge that goes on is split, a missing one added."""
        found = self.match(keys)
        if not len(keys):
            return []
        node = found.path[-1] if found.path else self.root
        if found.length < node.end:
            node = node.split(found.length, self.kinds)
        if found.length < len(keys):
            node = node.grow(keys[found.length :])
        return node.path

    def rest(self, caches: RowCaches, leaf: Node) -> None:
        """Keep the caches of a row that has ended at `leaf`."""
        self._rests.append(Rest(caches, leaf))

    def take_rest(self, keys: Keys, length: int) -> RowCaches | None:
        """Resting caches that hold at least the first `length` keys of a prompt, to go on with in place."""
        best = None
        for rest in self._rests:
            path = rest.leaf.path
            shared = 0
            for node in path:
                shared += common(node.keys, keys[node.start :])
                if shared < node.end:
                    break
            if shared >= length and (best is None or rest.leaf.last_used > best.leaf.last_used):
                best = rest
        if best is None:
            return None
        self._rests.remove(best)
        return best.caches

    def tidy(self) -> None:
        """End the rests whose last node lives in other memory by now."""
        for rest in list(self._rests):
            mine = {id(cache) for cache in rest.caches if cache is not None}
            if not any(id(owner) in mine for owner in owners(rest.leaf.snapshots)):
                self._rests.remove(rest)
                rest.free()

    def shrink(self, budget: int) -> None:
        """Forget what was used longest ago until at most `budget` bytes are held, or nothing more can go."""
        held = self.nbytes
        while held > budget and self._forget_one():
            held = self.nbytes

    def forget(self, caches: RowCaches) -> None:
        """Drop every node that shares memory with these caches, and what hangs below: their row has failed."""
        failed = {id(cache) for cache in caches if cache is not None}
        for node in list(self.nodes()):
            if any(id(owner) in failed for owner in owners(node.snapshots)):
                self._remove(node)

    def clear(self) -> None:
        """Forget everything."""
        self.root.children.clear()
        for rest in self._rests:
            rest.free()
        self._rests.clear()

    def compact(self, path: Sequence[Node]) -> None:
        """Join nodes of a path where the upper one has one child and no state of its own, if that copies nothing."""
        for node in path[1:]:
            above = node.parent
            assert above is not None
            if len(above.children) > 1 or self._restorable(above) or any(rest.leaf is above for rest in self._rests):
                continue
            pairs = zip(self.kinds, above.snapshots, node.snapshots, strict=True)
            if all(_joins_freely(first, second) for kind, first, second in pairs if keeps_every_position(kind)):
                node.absorb(self.kinds)

    def _restorable(self, node: Node) -> bool:
        """Whether the node holds a state that no other node can give."""
        pairs = zip(self.kinds, node.snapshots, strict=True)
        return any(snapshot is not None and not keeps_every_position(kind) for kind, snapshot in pairs)

    def _forget_one(self) -> bool:
        """Make one step towards less memory; False when nothing is left to forget."""
        candidates = [node for node in self.nodes() if not node.children or self._restorable(node)]
        if not candidates:
            return self._free_oldest_rest()
        oldest = min(candidates, key=lambda node: (node.last_used, -node.end, -node.nbytes))
        if oldest.children:
            for slot, kind in enumerate(self.kinds):
                if not keeps_every_position(kind):
                    oldest.snapshots[slot] = None
        else:
            self._remove(oldest)
        return True

    def _free_oldest_rest(self) -> bool:
        if not self._rests:
            return False
        self._rests.pop(0).free()
        return True

    def _remove(self, node: Node) -> None:
        """Take a node and all below it out of the trie, and end the rests there."""
        parent = node.parent
        assert parent is not None
        below = [node]
        for each in below:
            below += each.children.values()
        first = int(node.keys[0])
        if parent.children.get(first) is node:
            del parent.children[first]
        gone = {id(each) for each in below}
        ended = [rest for rest in self._rests if id(rest.leaf) in gone]
        for each in below:
            each.snapshots = [None] * len(self.kinds)
        for rest in ended:
            self._end(rest, parent)

    def _end(self, rest: Rest, above: Node) -> None:
        """A rest whose last node is gone goes on at the node above, while that still shares its memory."""
        mine = {id(cache) for cache in rest.caches if cache is not None}
        while above.parent is not None and not any(id(owner) in mine for owner in owners(above.snapshots)):
            above = above.parent
        still = above.parent is not None
        if still and not above.children:
            rest.leaf = above
            return
        self._rests.remove(rest)
        rest.free()
