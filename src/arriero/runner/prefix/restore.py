"""From stored snapshots to caches that a row goes on with."""

from __future__ import annotations

from collections.abc import Sequence

from arriero.model.contract import Cache, RowCaches
from arriero.runner.prefix.node import Node, keeps_every_position


def restore(caches: RowCaches, path: Sequence[Node], length: int) -> int:
    """Bring caches (fresh, or resting ones whose history agrees as far as `length`) to one offset; returns it.

    The offset is the greatest, at most `length`, that every cache can reach: `length` itself, else the end of a node.
    """
    ends = [node.end for node in reversed(path) if node.end < length]
    for target in [length, *ends]:
        if target and _reach(caches, path, target):
            return target
    for cache in caches:
        if cache is not None and not cache.rewind(0):
            cache.free()
    return 0


def _reach(caches: RowCaches, path: Sequence[Node], target: int) -> bool:
    """Every cache to `target`; False, with some of them elsewhere, when one can't. Those most likely to fail first."""
    known = [node for node in path if node.start < target]
    picky = [slot for slot, cache in enumerate(caches) if cache is not None and not keeps_every_position(cache)]
    easy = [slot for slot, cache in enumerate(caches) if keeps_every_position(cache)]
    return all(_one(caches[slot], slot, known, target) for slot in picky + easy)


def _one(cache: Cache | None, slot: int, path: Sequence[Node], target: int) -> bool:
    assert cache is not None
    last = path[-1].snapshots[slot]
    if not keeps_every_position(cache):
        return cache.rewind(target) or (last is not None and cache.restore(last, target))
    if cache.offset >= target:
        return cache.rewind(target)
    for node in path:
        if node.end <= cache.offset:
            continue
        snapshot = node.snapshots[slot]
        if snapshot is None or not cache.restore(snapshot, min(node.end, target)):
            return False
    return cache.offset == target
