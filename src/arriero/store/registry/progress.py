"""How far the blobs of a model are, counted by many threads and told as status objects by one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

Report = Callable[[dict[str, Any]], None]
"""Takes each status object (`{"status", "digest"?, "total"?, "completed"?}`); raising ends the transfer."""


class Tally:
    """Bytes done of each blob."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self._sizes = sizes
        self._done = dict.fromkeys(sizes, 0)
        self._told: dict[str, int] = {}
        self._lock = threading.Lock()

    def add(self, digest: str, count: int) -> None:
        """Some more (or, after a setback, fewer) bytes of a blob."""
        with self._lock:
            self._done[digest] += count

    def put(self, digest: str, done: int) -> None:
        """All that is there of a blob."""
        with self._lock:
            self._done[digest] = done

    def news(self, verb: str, *, together: bool) -> Iterator[dict[str, Any]]:
        """Status objects for what has changed since the last call; `together` makes one of all blobs."""
        with self._lock:
            done = dict(self._done)
        if together:
            # The digest is none: clients show one bar for each that they see.
            done = {"sha256:model": sum(done.values())}
        for digest, count in done.items():
            if self._told.get(digest) != count:
                self._told[digest] = count
                total = sum(self._sizes.values()) if together else self._sizes[digest]
                label = "model" if together else digest[7:19]
                yield {"status": f"{verb} {label}", "digest": digest, "total": total, "completed": count}
