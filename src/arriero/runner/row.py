"""One sequence on its way through the engine: waiting → prefilling → decoding → done.

Refuses to know other rows, sampling and messages beyond its own request.
"""

from __future__ import annotations

import time
from enum import Enum

import msgspec
import numpy as np

from arriero.model.contract import Layout, ModelFacts, RowCaches
from arriero.runner.images import RowImages
from arriero.runner.messages import Finished, Submit
from arriero.runner.prefix.keys import Keys, Media, row_keys
from arriero.runner.prefix.store import Reuse

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
        "images",
        "keys",
        "last_token_at",
        "leader",
        "max_new",
        "outputs",
        "phase",
        "position",
        "prompt",
        "request",
        "reserved",
        "reuse",
        "sampled",
        "shared",
        "slot",
        "stop_ids",
    )

    def __init__(self, request: Submit, max_new: int, reserved: int, images: RowImages | None = None) -> None:
        self.id = request.id
        self.request = request
        self.prompt = np.array(request.tokens, np.int32)
        media = [Media(image.offset, image.end, image.patches.identity) for image in request.images]
        self.keys = row_keys(self.prompt, media)
        """What identifies each position of the prompt in the prefix store."""
        self.images = images
        """None in a row of text."""
        self.stop_ids = frozenset(request.stop_tokens)
        self.max_new = max_new
        """Tokens to generate at most: the request's figure cut to the context."""
        self.reserved = reserved
        """Bytes that admission counts for this row."""
        self.phase = Phase.WAITING
        self.reuse: Reuse | None = None
        """How it began; None before it is admitted."""
        self.leader: Row | None = None
        """A row that is reading the first `shared` positions of this one's prompt, while this one waits for it."""
        self.shared = 0
        self.caches: RowCaches = []
        self.position = 0
        """Tokens forwarded (or dispatched) so far = the position that the next one takes."""
        self.sampled = 0
        """Tokens whose sampling was dispatched; one ahead of `generated` in a running pipeline."""
        self.slot = 0
        """Its index among the decoding rows of the latest forward."""
        self.generated = 0
        """Tokens read on the host and delivered."""
        self.outputs: list[int] = []
        """Every token read, the one that stopped the row included: what stands in the caches behind the prompt."""
        self.admitted_at = 0
        self.decode_started_at = 0
        self.last_token_at = 0

    @property
    def prompt_left(self) -> int:
        """Prompt tokens still to be prefilled: all but the last, which seeds the decode."""
        return len(self.prompt) - 1 - self.position

    @property
    def layout(self) -> Layout | None:
        """Positions on several axes, for its spans."""
        return self.images.layout if self.images is not None else None

    def all_keys(self) -> Keys:
        """The keys of the prompt and of every token read."""
        return np.concatenate([self.keys, row_keys(self.outputs)])

    def admit(self, reuse: Reuse) -> None:
        """Start: from here the row owns memory."""
        # What is left of the pixels is in `images`, which forgets them one by one.
        self.request = msgspec.structs.replace(self.request, images=[])
        self.reuse = reuse
        self.leader = None
        self.caches = reuse.caches
        self.position = reuse.offset
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
            cached_tokens=self.reuse.offset if self.reuse is not None else 0,
            generated_tokens=self.generated,
            prefill_ns=decoding - started,
            decode_ns=max(self.last_token_at - decoding, 0) if self.generated else 0,
        )

    def end(self) -> None:
        """Let go of the caches, which the prefix store has taken over; a forward still running keeps what it reads."""
        self.phase = Phase.DONE
        self.caches = []


def reserved_bytes(tokens: int, facts: ModelFacts) -> int:
    """Bytes that a row of `tokens` positions may grow to, caches rounded up to their growth step."""
    rounded = -(-tokens // CACHE_STEP) * CACHE_STEP
    return rounded * facts.cache_bytes_per_token + facts.cache_bytes_fixed
