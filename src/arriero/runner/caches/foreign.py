"""The memory of a model that others implement: all of its layers' caches as one whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from arriero.model.contract import Snapshot
from arriero.runner.caches.snapshot import WholeSnapshot
from arriero.runner.caches.whole import WholeCache


class ForeignLayer(Protocol):
    """What the caches of mlx-lm answer. `state` is a tree of arrays, numbers and names that can be set again."""

    state: Any

    @property
    def nbytes(self) -> int: ...

    def is_trimmable(self) -> bool: ...

    def trim(self, n: int) -> int: ...


@dataclass(frozen=True, slots=True)
class Place:
    """Where an array stands in a tree whose arrays are kept apart."""

    index: int
    scalar: bool


class ForeignSnapshot(WholeSnapshot):
    """The whole state of such a memory: the arrays, and the trees that they were taken out of.

    Not a `StateSnapshot`, since arrays alone don't make a state again; so it is never written to disk.
    """

    __slots__ = ("form",)

    def __init__(self, end: int, arrays: Sequence[mx.array], form: list[Any]) -> None:
        super().__init__(end, arrays, compact=False)
        self.form = form


class ForeignCache(WholeCache[ForeignSnapshot]):
    """One opaque memory of one row. What it can do depends on what the layers can.

    A rewind works by itself where every layer can drop its last positions (whole keys and values; a window that has not
    turned yet), and with a snapshot elsewhere. Captures need the forward to stop at their offsets: the model asks
    `splits`, runs the pieces on `layers`, and calls `advance` after each.
    """

    def __init__(self, make: Callable[[], Sequence[ForeignLayer]]) -> None:
        super().__init__()
        self._make = make
        self.layers = list(make())

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def state(self) -> list[mx.array]:
        """The live arrays and those of captures that were not taken yet."""
        leaves = cast(list[tuple[str, Any]], tree_flatten([layer.state for layer in self.layers]))
        arrays = [leaf for _, leaf in leaves if isinstance(leaf, mx.array)]
        for capture in self._schedule.captured:
            if isinstance(capture, ForeignSnapshot):
                arrays += capture.arrays
        return arrays

    def splits(self, length: int) -> list[int]:
        """Numbers of tokens, ascending, each in `(0, length)`, after which the forward must stop for a capture."""
        return self._schedule.interior(self._offset, length)

    def advance(self, length: int) -> None:
        """The layers have taken `length` more positions."""
        self._offset += length
        self._schedule.cross(self._offset, self._capture)

    def restore(self, snapshot: Snapshot, offset: int | None = None) -> bool:
        """Continue from a state; before its end only where the layers can drop positions."""
        if not isinstance(snapshot, ForeignSnapshot):
            raise TypeError(f"a {type(snapshot).__name__} is not a snapshot of a foreign memory")
        target = snapshot.end if offset is None else offset
        if not 0 < target <= snapshot.end:
            return False
        other = ForeignCache(self._make)
        if len(snapshot.form) != len(other.layers):
            return False
        for layer, form in zip(other.layers, snapshot.form, strict=True):
            layer.state = _filled_in(form, snapshot.arrays)
        if not other._drop(snapshot.end - target):
            return False
        self._schedule.abandon()
        self.layers, self._offset = other.layers, target
        return True

    def _clear(self) -> None:
        self.layers, self._offset = list(self._make()), 0

    def _drop(self, count: int) -> bool:
        """Forget the last positions in every layer, or in none."""
        if count == 0:
            return True
        if not all(layer.is_trimmable() for layer in self.layers):
            return False
        arrays, form = _taken(self.layers)
        if all(layer.trim(count) == count for layer in self.layers):
            return True
        # Some layer held fewer positions than that.
        for layer, part in zip(self.layers, form, strict=True):
            layer.state = _filled_in(part, arrays)
        return False

    def _capture(self, start: int, offset: int) -> ForeignSnapshot | None:
        return ForeignSnapshot(offset, *_taken(self.layers)) if offset else None


def _taken(layers: Sequence[ForeignLayer]) -> tuple[list[mx.array], list[Any]]:
    """All arrays of the layers' states, and the states with a `Place` for each array.

    The arrays are objects of their own over the same memory: mlx-lm assigns to ranges of its arrays, which changes the
    object that holds them.
    """
    arrays: list[mx.array] = []

    def out(leaf: Any) -> Any:
        if not isinstance(leaf, mx.array):
            return leaf
        arrays.append(mx.array(leaf) if leaf.ndim else leaf.reshape(1))
        return Place(len(arrays) - 1, leaf.ndim == 0)

    return arrays, [tree_map(out, layer.state) for layer in layers]


def _filled_in(form: Any, arrays: Sequence[mx.array]) -> Any:
    """A state made of its form again, with array objects of its own."""

    def back(leaf: Any) -> Any:
        if not isinstance(leaf, Place):
            return leaf
        array = mx.array(arrays[leaf.index])
        return array.reshape(()) if leaf.scalar else array

    return tree_map(back, form)
