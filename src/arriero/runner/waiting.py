"""What a row waits for before it begins: another that reads the same prompt, files of its prefix, its grammar."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from arriero.runner.prefix.keys import common
from arriero.runner.prefix.store import PrefixStore
from arriero.runner.row import Phase, Row

WORTH_WAITING = 64
"""Prompt positions that a row must save by waiting for another that reads the same."""

WAIT_SECONDS = 0.02
"""How long an idle engine waits for a grammar or a file before it looks at its messages again."""


class Waiting:
    """Decides whether a row of one engine may begin."""

    def __init__(self, prefixes: PrefixStore, *, follow: bool) -> None:
        """`follow`: whether anything is stored that rows could share."""
        self._prefixes = prefixes
        self._follow = follow

    def may_begin(self, row: Row, running: Sequence[Row]) -> bool:
        """Whether nothing keeps a waiting row; has what can be fetched for it fetched."""
        return not self._follows(row, running) and self._fetched(row) and (not row.constraint or row.constraint.ready)

    def pause(self, waiting: Iterable[Row]) -> None:
        """Nothing runs: wait a moment for what the first of the waiting rows can't begin without."""
        for row in waiting:
            if row.reading is not None and not row.reading.done:
                row.reading.wait(WAIT_SECONDS)
                return
            if row.constraint is not None:
                row.constraint.wait(WAIT_SECONDS)
                return

    def _fetched(self, row: Row) -> bool:
        """Whether the stored prefix of a row is read from disk, as far as it has to be; begins that."""
        if row.reading is None:
            row.reading = self._prefixes.read_ahead(row.keys)
        return row.reading.done

    def _follows(self, row: Row, running: Sequence[Row]) -> bool:
        """Whether a row waits for another that is just reading a good deal of its prompt."""
        if not self._follow:
            return False
        leader = row.leader
        if leader is not None and (leader.phase is not Phase.PREFILLING or leader.position >= row.shared):
            if leader.phase is Phase.PREFILLING and leader.reuse is not None:
                self._prefixes.share(leader.reuse, leader.keys)
            # Another one of those that waited for it may be reading the rest of what this one needs.
            leader = row.leader = None
        return leader is not None or self._find_leader(row, running)

    def _find_leader(self, row: Row, running: Sequence[Row]) -> bool:
        known = self._prefixes.known(row.keys)
        for other in running:
            shared = min(common(row.keys, other.keys), len(row.prompt) - 1, len(other.prompt) - 1)
            if other.phase is Phase.PREFILLING and shared - max(known, other.position) >= WORTH_WAITING:
                row.leader, row.shared = other, shared
                if other.reuse is not None:
                    self._prefixes.share(other.reuse, other.keys, capture=shared)
                return True
        return False
