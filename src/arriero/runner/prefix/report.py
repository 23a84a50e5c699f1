"""What is said of a prompt's stored prefix."""

from __future__ import annotations

from arriero.runner.messages import PrefixUsed
from arriero.runner.prefix.keys import second
from arriero.runner.row import Row


def prefix_used(row: Row) -> PrefixUsed | None:
    """How much of a row's prompt was known, and what is stored where it goes on otherwise; None before admission."""
    reuse = row.reuse
    if reuse is None:
        return None
    matched, stored = reuse.matched, [int(key) for key in reuse.differs]
    if row.lookahead and (matched or (stored and stored[0] >> 32 == int(row.prompt[0]))):
        # A pair that differs differs in its second token: its first is the second of the pair before.
        matched, stored = matched + 1, [second(key) for key in stored]
    elif row.lookahead:
        stored = [key >> 32 for key in stored]
    return PrefixUsed(row.id, len(row.prompt), matched, reuse.offset, stored)
