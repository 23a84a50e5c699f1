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
    """Fill one forward's `budget` of prompt tokens, oldest row first; several rows may share it.

    A row's last prompt token never goes into a chunk: it seeds the decode.
    """
    chunks = []
    for row in rows:
        if budget <= 0:
            break
        if row.phase is Phase.PREFILLING:
            length = min(row.prompt_left, budget)
            chunks.append(Chunk(row, row.position, length))
            budget -= length
    return chunks
