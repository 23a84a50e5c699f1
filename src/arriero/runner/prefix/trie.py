"""The prefix trie: what earlier rows computed, found again by the keys of a new prompt.

Nodes hold immutable snapshots. The caches of a row that has ended **rest** here: they stay the memory of its nodes'
lazy snapshots, so storing a conversation copies nothing, and the next turn takes them over and goes on in place.
Everything stored counts against a budget of bytes; what was used longest ago goes first, a parent never before its
child.

Only the array thread may call it. Refuses to know tokens' text, requests and the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from arriero.model.contract import RowCaches, Snapshot
from arriero.runner.caches.linear import LinearCache
from arriero.runner.prefix.keys import Keys, common
from arriero.runner.prefix.node import Ledger, Node, keeps_every_position, owners

_EMPTY = np.zeros(0, np.uint64)
_SHOWN = 8
"""Stored keys that a match shows where a prompt differs."""

MOST_NODES = 4096
"""However few bytes they hold: every node costs host memory, and time where the oldest one is looked for."""


class Rest:
    """Caches of a row that has ended, at the end of its last node. Nobody writes to them, so their size stays."""

    __slots__ = ("caches", "leaf", "nbytes")

    def __init__(self, caches: RowCaches, leaf: Node) -> None:
        self.caches = caches
        self.leaf = leaf
        self.nbytes = sum(cache.nbytes for cache in caches if cache is not None and isinstance(cache, LinearCache))
        """Bytes of the buffers that lazy snapshots share; whole states count with their own snapshots."""

    def shares(self, node: Node) -> bool:
        """Whether the node's snapshots still live in these caches."""
        mine = {id(cache) for cache in self.caches if cache is not None}
        return any(id(owner) in mine for owner in owners(node.snapshots))

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
        self._ledger = Ledger(kinds)
        self.root = Node(None, _EMPTY, 0, self._ledger)
        self._rests: dict[int, Rest] = {}
        """By identity, the oldest first."""
        self._resting = 0
        """Their bytes."""
        self._clock = 0

    @property
    def nbytes(self) -> int:
        """Bytes that are held for later rows."""
        return self._ledger.nbytes + self._resting

    def __len__(self) -> int:
        """Nodes but the root."""
        return self._ledger.nodes

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
                return Match(path, at, self._instead(node, int(keys[at])))
            same = common(child.keys, keys[at:])
            path.append(child)
            at += same
            if same < len(child.keys):
                return Match(path, at, child.keys[same : same + _SHOWN].tolist() if at < len(keys) else ())
            node = child
        return Match(path, at)

    def _instead(self, node: Node, key: int) -> Sequence[int]:
        """The first keys stored behind a node where `key` is not: of pairs that begin alike, else those used last."""
        others = node.children.items()
        nearest = max(others, key=lambda item: (item[0] >> 32 == key >> 32, item[1].last_used), default=None)
        return () if nearest is None else nearest[1].keys[:_SHOWN].tolist()

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
            node = node.split(found.length)
        if found.length < len(keys):
            node = node.grow(keys[found.length :])
        return node.path

    def rest(self, caches: RowCaches, leaf: Node) -> None:
        """Keep the caches of a row that has ended at `leaf`."""
        rest = Rest(caches, leaf)
        leaf.rests.append(rest)
        self._rests[id(rest)] = rest
        self._resting += rest.nbytes

    def take_rest(self, path: Sequence[Node], length: int) -> RowCaches | None:
        """Resting caches that hold the first `length` keys of the matched `path`, to go on with in place.

        None, too, where they hold more behind `length` than before: that would have to be copied out, and copying what
        comes before into other caches takes less.
        """
        top = next((node for node in path if node.end >= length), None)
        if top is None:
            return None
        best, waiting = None, [top]
        for node in waiting:
            waiting += node.children.values()
            if node.rests and node.end <= 2 * length and (best is None or node.last_used > best.leaf.last_used):
                best = node.rests[-1]
        if best is None:
            return None
        self._part(best)
        return best.caches

    def tidy(self, path: Sequence[Node]) -> None:
        """End the rests on a path whose last node lives in other memory by now."""
        for node in path:
            for rest in [rest for rest in node.rests if not rest.shares(node)]:
                self._part(rest)
                rest.free()

    def shrink(self, budget: int) -> None:
        """Forget what was used longest ago until at most `budget` bytes are held, or nothing more can go."""
        if self.nbytes <= budget and len(self) <= MOST_NODES:
            return
        oldest = [_age(node) for node in self.nodes() if not node.children or node.restorable]
        heapify(oldest)
        while oldest and (self.nbytes > budget or len(self) > MOST_NODES):
            node = heappop(oldest)[-1]
            above = node.parent
            if above is None:
                continue
            if not node.children:
                self._remove(node)
                if not above.children and above.parent is not None:
                    heappush(oldest, _age(above))
            elif self.nbytes > budget:
                for slot, kind in enumerate(self.kinds):
                    if not keeps_every_position(kind):
                        node.snapshots[slot] = None
                node.recount()
        while self.nbytes > budget and self._rests:
            rest = next(iter(self._rests.values()))
            self._part(rest)
            rest.free()

    def forget(self, caches: RowCaches, states: Sequence[Snapshot] = ()) -> None:
        """Drop every node that shares memory with these caches or holds one of these states, and what hangs below:
        their row has failed.
        """
        failed = {id(each) for each in (*caches, *states) if each is not None}
        for node in list(self.nodes()):
            if node.parent is not None and any(
                id(each) in failed for each in (*owners(node.snapshots), *node.snapshots)
            ):
                self._remove(node)

    def clear(self) -> None:
        """Forget everything."""
        for node in list(self.root.children.values()):
            self._remove(node)

    def compact(self, path: Sequence[Node]) -> None:
        """Join nodes of a path where the upper one has one child and no state of its own, if that copies nothing."""
        for node in path[1:]:
            above = node.parent
            assert above is not None
            if len(above.children) > 1 or above.restorable or above.rests:
                continue
            pairs = zip(self.kinds, above.snapshots, node.snapshots, strict=True)
            if all(_joins_freely(first, second) for kind, first, second in pairs if keeps_every_position(kind)):
                node.absorb()

    def _part(self, rest: Rest) -> None:
        """The trie no longer keeps these caches."""
        rest.leaf.rests.remove(rest)
        del self._rests[id(rest)]
        self._resting -= rest.nbytes

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
        ended = [rest for each in below for rest in each.rests]
        for each in below:
            each.drop()
        for rest in ended:
            self._end(rest, parent)

    def _end(self, rest: Rest, above: Node) -> None:
        """A rest whose last node is gone goes on at the node above, while that still shares its memory."""
        while above.parent is not None and not rest.shares(above):
            above = above.parent
        if above.parent is not None and not above.children:
            rest.leaf.rests.remove(rest)
            rest.leaf = above
            above.rests.append(rest)
            return
        self._part(rest)
        rest.free()


def _age(node: Node) -> tuple[int, int, int, int, Node]:
    """What goes first is least: used longest ago, then furthest from the root, then largest."""
    return node.last_used, -node.end, -node.nbytes, id(node), node
