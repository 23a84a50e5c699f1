"""What the engine asks of the prefix trie: begin a row where an earlier one got to, and keep what a row computed."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import numpy as np

from arriero.model.contract import RowCaches, Snapshot
from arriero.runner.caches.linear import LinearCache
from arriero.runner.caches.snapshot import RangeSnapshot
from arriero.runner.prefix.disk import DiskTier, Stretch
from arriero.runner.prefix.keys import Keys
from arriero.runner.prefix.node import Node, keeps_every_position
from arriero.runner.prefix.reading import Reading
from arriero.runner.prefix.record import digest, make_record
from arriero.runner.prefix.restore import restore
from arriero.runner.prefix.trie import PrefixTrie

RESTORE_EVERY = 8192
"""Prompt positions between two places to restore from, for caches that can't go back by themselves."""
BEFORE_END = 4
"""Such a place this far before a prompt's end: a regenerated answer, or another generation prompt, restarts there."""
WORTH_READING = 32
"""Positions that a file must add to what is known to be written, or read."""
PIECE_BYTES = 256 << 20
"""A longer stretch becomes several files."""
MOST_BOUNDARIES = 3
"""Ends of messages, the last ones, that become such places: each costs a state of every layer."""


@dataclass(slots=True)
class Reuse:
    """How a row began, and what it is to leave behind."""

    caches: RowCaches
    offset: int
    """Positions that the caches hold already."""
    matched: int
    """Positions whose keys were known, which may be more than could be restored."""
    differs: Sequence[int] = ()
    """The first stored keys where the prompt goes on otherwise."""
    planned: list[int] = field(default_factory=list)
    """Offsets where captures are due."""
    states: list[weakref.ref[Snapshot]] = field(default_factory=list)
    """Whole states that it has left in the trie so far: of no use, should the row fail."""


class MakesCaches(Protocol):
    """A model, or a model and its draft together."""

    def new_caches(self) -> RowCaches:
        """Fresh caches of a row."""
        ...


class PrefixStore:
    """Stored prefixes of one model. A budget of 0 stores nothing."""

    def __init__(self, model: MakesCaches, budget: int, disk: DiskTier | None = None) -> None:
        """`budget` is in bytes of memory; `disk` keeps what is stored beyond this process."""
        self._model = model
        self._disk = disk
        self._trie = PrefixTrie(model.new_caches(), budget)
        self._allowed = budget
        """Bytes that may be held now; less than the budget while rows have reserved the rest."""
        self._ranges = [keeps_every_position(kind) for kind in self._trie.kinds]
        self._all_ranges = all(r for r, kind in zip(self._ranges, self._trie.kinds, strict=True) if kind is not None)

    @property
    def nbytes(self) -> int:
        """Bytes held for later rows."""
        return self._trie.nbytes

    @property
    def trie(self) -> PrefixTrie:
        """The trie itself."""
        return self._trie

    def read_ahead(self, keys: Keys) -> Reading:
        """Have what the disk holds of a prompt beyond what is in memory read in the background, for `begin`."""
        if self._disk is None or not self._trie.budget:
            return Reading()
        known = self.known(keys)
        chain, length = self._disk.match(keys, parts=self._all_ranges)
        if length < known + WORTH_READING:
            return Reading()
        return self._disk.begin_reading(self._fitting([stretch for stretch in chain if stretch.end > known])[0])

    def begin(
        self,
        keys: Keys,
        boundaries: Sequence[int] = (),
        most: int | None = None,
        reading: Reading | None = None,
    ) -> Reuse:
        """Caches for a row with these keys, as far on as earlier rows got, at most to `most`.

        By default that leaves the last key's position to compute; keys of pairs are one fewer than there are positions.
        `reading` is what `read_ahead` gave; files that are not in it are read now.
        `boundaries` are offsets where messages end. The row plans captures there, every RESTORE_EVERY positions, near
        the prompt's end, and where it leaves what is stored.
        """
        if not self._trie.budget:
            return Reuse(self._model.new_caches(), 0, 0)
        most = len(keys) - 1 if most is None else most
        found = self._trie.match(keys)
        length = min(found.length, most)
        taken = self._trie.take_rest(found.path, length) if length else None
        caches = taken or self._model.new_caches()
        offset = restore(caches, found.path, length) if length else 0
        if taken and offset < found.path[-1].end:
            self._part(caches, keys, offset)
        if self._disk is not None and self._from_disk(self._disk, keys, offset, reading or Reading()):
            found = self._trie.match(keys)
            length = min(found.length, most)
            if length > offset:
                offset = restore(caches, found.path, length)
            self.shrink()
        if found.path:
            self._trie.touch(found.path[-1])
        self.shrink()  # a window that another row still shares was copied out
        # More than is stored by now where files needed the room of what was taken over.
        reuse = Reuse(caches, offset, max(found.length, offset), found.differs if found.length >= offset else ())
        self._plan(reuse, most, boundaries, length)
        return reuse

    def known(self, keys: Keys) -> int:
        """Positions of a prompt that are stored."""
        return self._trie.match(keys).length if self._trie.budget else 0

    def share(self, reuse: Reuse, keys: Keys, capture: int | None = None) -> None:
        """Store what a row has computed so far, while it goes on, and plan one more capture at offset `capture`.

        Between forwards only; `keys` are those of at least the positions that its caches hold.
        """
        offset = _offset(reuse.caches)
        if not self._trie.budget:
            return
        later = [each for each in reuse.planned if each > offset]
        if capture and capture >= offset and not self._all_ranges:
            later = sorted({*later, capture})
        last = self._attach(reuse, keys, offset, later)
        if self._all_ranges and offset:
            path = self._trie.advance(keys[:offset])
            self._cover(path, reuse.caches)
            last = path[-1]
        if last is not None:
            self._trie.touch(last)
        self.shrink()

    def close(self, reuse: Reuse, keys: Keys) -> None:
        """Keep what a row computed, whose positions have these keys; its caches belong to the store from here on."""
        caches = reuse.caches
        offset = _offset(caches)
        if not self._trie.budget or not offset:
            self._free(caches)
            return
        if offset > len(keys):
            self._free(caches)
            raise RuntimeError(f"the caches hold {offset} positions, but only {len(keys)} are known")
        self._attach(reuse, keys, offset, [])
        path = self._trie.advance(keys[:offset])
        self._cover(path, caches)
        last = path[-1]
        for slot, cache in enumerate(caches):
            if cache is not None and not self._ranges[slot] and last.snapshots[slot] is None:
                last.snapshots[slot] = cache.snapshot()
        last.recount()
        if self._disk is not None:
            self._to_disk(self._disk, keys, path, caches)
        self._trie.touch(last)
        self._trie.rest(caches, last)
        self._trie.tidy(path)
        self._trie.compact(path)
        self.shrink()

    def abandon(self, reuse: Reuse) -> None:
        """The row has failed: what its caches hold, and what shares their memory, is of no use."""
        states = [state for reference in reuse.states if (state := reference()) is not None]
        self._trie.forget(reuse.caches, states)
        self._free(reuse.caches)

    def shrink(self, budget: int | None = None) -> None:
        """Hold at most `budget` bytes (default: as many as last time), and never more than the store's own budget."""
        if budget is not None:
            self._allowed = min(budget, self._trie.budget)
        self._trie.shrink(self._allowed)

    def clear(self) -> None:
        """Forget everything that is in memory."""
        self._trie.clear()

    def shut(self) -> None:
        """Forget what is in memory, and wait until the disk has what it is to keep."""
        self.clear()
        if self._disk is not None:
            self._disk.close()

    def _part(self, caches: RowCaches, keys: Keys, offset: int) -> None:
        """Caches that were taken over go on at `offset`, before their end: what is stored of the rest moves out now.

        Done here and not by the row's first write, so that its bytes are counted before the row takes its own.
        """
        if offset:
            self._trie.advance(keys[:offset])
        for cache in caches:
            if isinstance(cache, LinearCache):
                cache.vacate(offset)
        self.shrink()

    def _plan(self, reuse: Reuse, most: int, boundaries: Sequence[int], matched: int) -> None:
        if self._all_ranges:
            return
        ends = sorted({end for end in boundaries if reuse.offset < end <= most})[-MOST_BOUNDARIES:]
        wanted = {*ends, *range(RESTORE_EVERY, most + 1, RESTORE_EVERY), most + 1 - BEFORE_END, matched}
        self._schedule(reuse, sorted(offset for offset in wanted if reuse.offset < offset <= most))

    def _schedule(self, reuse: Reuse, offsets: list[int]) -> None:
        reuse.planned = offsets
        for slot, cache in enumerate(reuse.caches):
            if cache is not None and not self._ranges[slot]:
                cache.plan(offsets)

    def _attach(self, reuse: Reuse, keys: Keys, reached: int, later: list[int]) -> Node | None:
        """Turn the captures so far into nodes, and go on with the plan `later`; returns the deepest of them."""
        last: Node | None = None
        rows: list[list[Snapshot | None]] = [
            [] if cache is None or self._ranges[slot] else cache.take() for slot, cache in enumerate(reuse.caches)
        ]
        for i, offset in enumerate(reuse.planned):
            if offset > reached:
                break
            path = self._trie.advance(keys[:offset])
            self._cover(path, reuse.caches)
            last = path[-1]
            for slot, captured in enumerate(rows):
                state = captured[i] if captured else None
                if state is not None and last.snapshots[slot] is None:
                    last.snapshots[slot] = state
                    reuse.states.append(weakref.ref(state))
            last.recount()
        self._schedule(reuse, later)
        return last

    def _cover(self, path: Sequence[Node], caches: RowCaches) -> None:
        """Let the row's caches be the memory of all positions on its path: one buffer a conversation, and no copy."""
        for node in path:
            for slot, cache in enumerate(caches):
                if self._ranges[slot] and cache is not None:
                    node.snapshots[slot] = cache.lazy(node.start, node.end)  # type: ignore[attr-defined]
            node.recount()

    def _from_disk(self, disk: DiskTier, keys: Keys, known: int, reading: Reading) -> bool:
        """Bring into memory what the disk holds beyond `known` positions; whether that was anything."""
        chain, length = disk.match(keys, parts=self._all_ranges)
        if length < known + WORTH_READING:
            return False
        wanted, total = self._fitting([stretch for stretch in chain if stretch.end > known])
        if not wanted:
            return False
        self._trie.shrink(self._allowed - total)
        if self._trie.match(keys).length < wanted[0].start:
            return True  # what they go on from had to make room
        for stretch in wanted:
            snapshots = disk.read(stretch, len(self._trie.kinds), reading)
            if snapshots is None:
                return True
            history = np.concatenate([keys[: stretch.start], stretch.keys])
            self._trie.advance(history[: stretch.start])
            path = self._trie.advance(history)
            self._fill([node for node in path if node.start >= stretch.start], snapshots)
            self._trie.touch(path[-1])
        disk.touch(chain)
        return True

    def _fitting(self, stretches: Sequence[Stretch]) -> tuple[list[Stretch], int]:
        """Those of them, from the first on, that may be in memory at once, and their bytes."""
        wanted: list[Stretch] = []
        total = 0
        for stretch in stretches:
            if total + stretch.nbytes > self._allowed:
                break
            total += stretch.nbytes
            wanted.append(stretch)
        return wanted, total

    def _fill(self, nodes: Sequence[Node], snapshots: list[Snapshot | None]) -> None:
        """Divide the snapshots of one stretch among its nodes, which keep what they have."""
        for node in nodes:
            for slot, kind in enumerate(self._trie.kinds):
                snapshot = snapshots[slot]
                if kind is None or snapshot is None:
                    continue
                piece: Snapshot | None = None
                if self._ranges[slot]:
                    piece, snapshots[slot] = kind.split(snapshot, node.end)
                elif snapshot.end == node.end:
                    piece = snapshot
                if node.snapshots[slot] is None:
                    node.snapshots[slot] = piece
            node.recount()

    def _to_disk(self, disk: DiskTier, keys: Keys, path: Sequence[Node], caches: RowCaches) -> None:
        """Write what the disk does not know of a row's path."""
        chain, known = disk.match(keys[: path[-1].end], waiting=True)
        if path[-1].end - known < WORTH_READING:
            return
        above = chain[-1] if chain else None
        for node in path:
            start = max(node.start, known)
            while start < node.end:
                pieces = [
                    cache.lazy(start, node.end) if self._ranges[slot] and cache is not None else node.snapshots[slot]  # type: ignore[attr-defined]
                    for slot, cache in enumerate(caches)
                ]
                end = node.end
                nbytes = sum(_bytes(piece) for piece in pieces if piece is not None)
                if nbytes > PIECE_BYTES and end - start > WORTH_READING:
                    end = start + max(WORTH_READING, (end - start) * PIECE_BYTES // nbytes)
                    nbytes = PIECE_BYTES
                    pieces = [
                        cache.lazy(start, end) if self._ranges[slot] and cache is not None else None  # type: ignore[attr-defined]
                        for slot, cache in enumerate(caches)
                    ]
                if not disk.room(nbytes):
                    return
                record = make_record(keys, start, end, pieces, digest(keys[:start]))
                if record is None:
                    return
                above = disk.keep(record, keys, above)
                start = end

    def _free(self, caches: RowCaches) -> None:
        for cache in caches:
            if cache is not None:
                cache.free()


def _bytes(snapshot: Snapshot) -> int:
    """Of what it holds, its own or shared."""
    arrays = snapshot.arrays() if isinstance(snapshot, RangeSnapshot) else ()
    return sum(array.nbytes for array in arrays) or snapshot.nbytes


def _offset(caches: RowCaches) -> int:
    """Positions that all caches hold; raises when they disagree, since whatever was stored would be wrong."""
    offsets = [cache.offset for cache in caches if cache is not None]
    if any(first != second for first, second in pairwise(offsets)):
        raise RuntimeError(f"the caches of a row stand at different offsets: {sorted(set(offsets))}")
    return offsets[0] if offsets else 0
