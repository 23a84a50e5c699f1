"""What an engine may take, and what it has taken."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """What rows may take."""

    context_length: int
    """Most tokens of one row, prompt and reply."""
    max_rows: int = 8
    prefill_chunk: int = 512
    """Most prompt tokens in one forward."""
    cache_bytes: int = 0
    """Bytes that admitted rows may reserve together; 0 = no limit."""
    prefix_bytes: int = 0
    """Bytes that stored prefixes may take of what no row has reserved; 0 = nothing is stored."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What the engine holds and has done."""

    rows_running: int = 0
    rows_waiting: int = 0
    reserved_bytes: int = 0
    cache_bytes: int = 0
    snapshot_bytes: int = 0
    tokens_generated: int = 0
    tokens_prefilled: int = 0
    draft_rounds: int = 0
    drafts_judged: int = 0
    drafts_accepted: int = 0
