"""Which prompt tokens the next forward takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from arriero.runner.row import Phase, Row


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive prompt tokens of one row in one forward."""

    row: Row
    start: int
    length: int

    @property
    def end(self) -> int:
        """Prompt tokens in the row's caches once this chunk is computed."""
        return self.start + self.length


def plan_chunks(rows: Sequence[Row], budget: int) -> list[Chunk]:
    """Share one forward's `budget` of prompt tokens among the rows that have some left, oldest first in `rows`.

    Half goes to the oldest row, so that it always gets on; the rest to those with the least left, so that a short
    prompt need not wait for all of a long one. A row's last prompt token never goes into a chunk: it seeds the decode.
    An image that must not be cut makes a chunk shorter, or longer than the budget.
    """
    prefilling = [row for row in rows if row.phase is Phase.PREFILLING]
    turns = [(row, budget - budget // 2) for row in prefilling[:1]]
    turns += [(row, budget) for row in sorted(prefilling, key=lambda row: row.prompt_left)]
    lengths = dict.fromkeys(prefilling, 0)
    for row, most in turns:
        length = min(row.prompt_left - lengths[row], most, budget)
        lengths[row] += length
        budget -= length
    lengths = {row: row.images.whole(row.position, n) if row.images else n for row, n in lengths.items()}
    return [Chunk(row, row.position, length) for row, length in lengths.items() if length]
