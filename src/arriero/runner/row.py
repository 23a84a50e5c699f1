"""One sequence on its way through the engine: waiting → prefilling → decoding → done.

Refuses to know other rows, sampling and messages beyond its own request.
"""

from __future__ import annotations

import time
from enum import Enum

import numpy as np

from arriero.model.contract import ModelFacts, RowCaches
from arriero.runner.messages import Finished, Submit

CACHE_STEP = 256
"""Positions that growing caches allocate at once (design: contiguous caches grow in steps of 256)."""


class Phase(Enum):
    """Where a row stands; a row never goes back."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    DONE = "done"


class Row:
    """A request and what has been computed for it. Owns its caches from admission until it is done."""

    __slots__ = (
        "admitted_at",
        "caches",
        "decode_started_at",
        "generated",
        "id",
        "last_token_at",
        "max_new",
        "phase",
        "position",
        "prompt",
        "request",
        "reserved",
        "sampled",
        "slot",
        "stop_ids",
    )

    def __init__(self, request: Submit, max_new: int, reserved: int) -> None:
        self.id = request.id
        self.request = request
        self.prompt = np.array(request.tokens, np.int32)
        self.stop_ids = frozenset(request.stop_tokens)
        self.max_new = max_new
        """Tokens to generate at most: the request's figure cut to the context."""
        self.reserved = reserved
        """Bytes that admission counts for this row."""
        self.phase = Phase.WAITING
        self.caches: RowCaches = []
        self.position = 0
        """Tokens forwarded (or dispatched) so far = the position that the next one takes."""
        self.sampled = 0
        """Tokens whose sampling was dispatched; one ahead of `generated` in a running pipeline."""
        self.slot = 0
        """Its index among the decoding rows of the latest forward."""
        self.generated = 0
        """Tokens read on the host and delivered."""
        self.admitted_at = 0
        self.decode_started_at = 0
        self.last_token_at = 0

    @property
    def prompt_left(self) -> int:
        """Prompt tokens still to be prefilled: all but the last, which seeds the decode."""
        return len(self.prompt) - 1 - self.position

    def admit(self, caches: RowCaches) -> None:
        """Start: from here the row owns memory."""
        self.caches = caches
        self.admitted_at = time.monotonic_ns()
        if self.prompt_left:
            self.phase = Phase.PREFILLING
        else:
            self.start_decoding()

    def start_decoding(self) -> None:
        """The prompt is in the caches but for its last token."""
        self.phase = Phase.DECODING
        self.prompt_evaluated()

    def prompt_evaluated(self) -> None:
        """Note when the last prefill chunk was seen complete: prefill time ends here and decode time begins."""
        self.decode_started_at = time.monotonic_ns()

    def token_read(self) -> None:
        """Count a delivered token."""
        self.generated += 1
        self.last_token_at = time.monotonic_ns()

    def finish(self, reason: str) -> Finished:
        """End the row, drop its caches, and say so."""
        now = time.monotonic_ns()
        started = self.admitted_at or now
        decoding = self.decode_started_at or now
        self.end()
        return Finished(
            id=self.id,
            reason=reason,  # type: ignore[arg-type]
            prompt_tokens=len(self.prompt),
            cached_tokens=0,
            generated_tokens=self.generated,
            prefill_ns=decoding - started,
            decode_ns=max(self.last_token_at - decoding, 0) if self.generated else 0,
        )

    def end(self) -> None:
        """Drop the caches; a forward that is still running keeps what it reads alive."""
        self.phase = Phase.DONE
        for cache in self.caches:
            if cache is not None:
                cache.free()
        self.caches = []


def reserved_bytes(tokens: int, facts: ModelFacts) -> int:
    """Bytes that a row of `tokens` positions may grow to, caches rounded up to their growth step."""
    rounded = -(-tokens // CACHE_STEP) * CACHE_STEP
    return rounded * facts.cache_bytes_per_token + facts.cache_bytes_fixed
