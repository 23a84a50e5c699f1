"""Chosen rows of mapped files, copied by threads of the host: many reads at once, and while the device computes.

Refuses to know MLX: the arrays that come out are NumPy's.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from arriero.formats.mapped import read_soon

THREADS = 8
"""Reads of a disk that run at once. 16,384 rows that nobody had looked at took 0.9 s on one thread, 0.27 s on eight."""

FEW = 64
"""Rows that one thread copies: the system is asked for all of them at once, and waking threads would take longer."""


@dataclass(frozen=True, slots=True)
class Copies:
    """Rows `numbers` (ascending, each once) of every column, valid when the work is done."""

    numbers: np.ndarray
    columns: list[np.ndarray]
    work: list[Future[None]] = field(default_factory=list)

    def wait(self) -> list[np.ndarray]:
        """The columns; raises what went wrong while copying."""
        for part in self.work:
            part.result()
        return self.columns


class FileRows:
    """Rows of a table that lies in shards of files, by number over all shards.

    `columns` are what makes up a row (codes, scales, …), each as one view `[rows, width]` a shard; `starts` are the
    numbers of the shards' first rows, and one past the last row.
    """

    def __init__(self, columns: Sequence[Sequence[np.ndarray]], starts: np.ndarray) -> None:
        self._columns = [list(shards) for shards in columns]
        self._starts = starts
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="table-rows")
        self._expected: Copies | None = None

    @property
    def parts(self) -> list[tuple[int, np.dtype]]:
        """Of each column the bytes of a row and the type of its elements."""
        return [(shards[0].shape[1] * shards[0].itemsize, shards[0].dtype) for shards in self._columns]

    @property
    def row_bytes(self) -> int:
        """What one row takes."""
        return sum(shards[0].shape[1] * shards[0].itemsize for shards in self._columns)

    def expect(self, numbers: np.ndarray) -> None:
        """Start to copy rows (ascending, each once) for the next `take`; a later call replaces them.

        Rows that are on their way already are not read again.
        """
        if self._expected is not None and _found(self._expected.numbers, numbers)[1].all():
            return
        self.forget()
        self._expected = self._begin(numbers, aside=True)

    def forget(self) -> None:
        """Drop what was expected; copies that have begun end by themselves."""
        if self._expected is not None:
            for part in self._expected.work:
                part.cancel()
            self._expected = None

    def take(self, numbers: np.ndarray) -> list[np.ndarray]:
        """Rows (ascending, each once) of every column, `[n, width]`: those that were expected are not read again."""
        expected, self._expected = self._expected, None
        if expected is None:
            return self._begin(numbers).wait()
        places, known = _found(expected.numbers, numbers)
        if not known.any():
            return self._begin(numbers).wait()
        if known.all():
            return [rows[places] for rows in expected.wait()]
        rest = self._begin(numbers[~known])
        held, read = expected.wait(), rest.wait()
        taken = []
        for ready, late in zip(held, read, strict=True):
            rows = np.empty((numbers.size, ready.shape[1]), ready.dtype)
            rows[known], rows[~known] = ready[places[known]], late
            taken.append(rows)
        return taken

    def _begin(self, numbers: np.ndarray, *, aside: bool = False) -> Copies:
        """Copy rows; `aside` leaves even a few to a thread."""
        outs = [np.empty((numbers.size, shards[0].shape[1]), shards[0].dtype) for shards in self._columns]
        if numbers.size <= FEW and not aside:
            self._copy(numbers, outs)
            return Copies(numbers, outs)
        edges = np.linspace(0, numbers.size, min(THREADS, -(-numbers.size // FEW)) + 1).astype(int)
        work = [
            self._threads.submit(self._copy, numbers[a:b], [out[a:b] for out in outs])
            for a, b in pairwise(edges.tolist())
        ]
        return Copies(numbers, outs, work)

    def _copy(self, numbers: np.ndarray, outs: Sequence[np.ndarray]) -> None:
        edges = np.searchsorted(numbers, self._starts)
        pieces = [(shard, a, b) for shard, (a, b) in enumerate(pairwise(edges.tolist())) if a < b]
        if numbers.size <= FEW:
            for shard, a, b in pieces:
                for shards in self._columns:
                    read_soon(shards[shard], numbers[a:b] - self._starts[shard])
        for shard, a, b in pieces:
            local = numbers[a:b] - self._starts[shard]
            for shards, out in zip(self._columns, outs, strict=True):
                # Numbers are checked by the caller; with another mode than "clip" NumPy would copy twice.
                np.take(_plain(shards[shard]), local, axis=0, out=_plain(out[a:b]), mode="clip")


def _found(held: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where in `held` each number would be, and whether it is there; both ascending."""
    if not held.size:
        return np.zeros(numbers.size, np.int64), np.zeros(numbers.size, bool)
    places = np.minimum(np.searchsorted(held, numbers), held.size - 1)
    return places, held[places] == numbers


def _plain(rows: np.ndarray) -> np.ndarray:
    """The same bytes in a type of NumPy's own: only of those it copies without holding up other threads."""
    return rows.view(np.uint16) if rows.dtype.itemsize == 2 else rows
