"""How patient and how greedy a transfer is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of transfers; the defaults are for the open network, tests use smaller ones."""

    streams: int = 8
    """Bodies that are transferred at once, over all blobs of a model."""
    part_least: int = 64 << 20
    part_most: int = 1 << 30
    """Bytes of one ranged part: a sixteenth of the blob between these two."""
    tries: int = 6
    """Failures in a row without a single new byte, after which a part is given up."""
    backoff: float = 1.0
    """Seconds before the second try; doubled from then on, up to 30."""
    stall: float = 30.0
    """Seconds without a byte after which a connection is dropped."""
    slow_after: float = 5.0
    """Seconds that a connection has before it is compared with the others; one far slower is replaced."""
    telling: int = 100_000
    """Bytes of the shortest body whose speed counts in that comparison."""
    save_every: float = 1.0
    """Seconds between two records of how far a download is."""
    report_every: float = 0.1
    """Seconds between two progress reports."""
    manifest: int = 32 << 20
    """Bytes of the largest manifest that is read."""
    reply: int = 64 << 10
    """Bytes of a token or an error that are read."""
    push_part: int = 100 << 20
    """Bytes of one part of an upload."""

    def part_size(self, size: int) -> int:
        """Bytes of each part of a blob."""
        return min(max(-(-size // 16), self.part_least), self.part_most)
