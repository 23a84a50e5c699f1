"""How long a row may be, and what it takes."""

from __future__ import annotations

from arriero.runner.messages import Ready

AUTOMATIC = (262144, 131072, 65536, 32768, 16384, 8192, 4096)
"""Context lengths to choose from when nobody asks for one."""

ROW_SHARE = 4
"""One row of an automatic context takes at most this part of the memory that is left beside the weights."""


def row_bytes(tokens: int, ready: Ready) -> int:
    """Bytes that the caches of a row of `tokens` positions may grow to."""
    rounded = -(-(tokens + ready.cache_ahead) // ready.cache_step) * ready.cache_step
    return rounded * ready.cache_bytes_per_token + ready.cache_bytes_fixed


def choose_context(requested: int, ready: Ready, free: int) -> int:
    """The context for a request: what it asks for, cut to the model's limit; for 0, what `free` bytes allow.

    The automatic choice is the longest whose row takes a quarter of `free`, and at least 4096 (or the model's limit).
    """
    if requested > 0:
        return min(requested, ready.context_length)
    choices = [ready.context_length, *(length for length in AUTOMATIC if length < ready.context_length)]
    for length in choices:
        if length <= AUTOMATIC[0] and row_bytes(length, ready) * ROW_SHARE <= free:
            return length
    return choices[-1]
