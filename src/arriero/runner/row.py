"""One sequence on its way through the engine: waiting → prefilling → decoding → done.

Refuses to know other rows, sampling and messages beyond its own request.
"""

from __future__ import annotations

import time
from enum import Enum
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from arriero.model.contract import DraftFacts, Layout, ModelFacts, RowCaches, Snapshot
from arriero.runner.caches.linear import grown
from arriero.runner.images import RowImages
from arriero.runner.messages import Finished, Submit
from arriero.runner.prefix.keys import UNKNOWN, Keys, Media, paired, row_keys
from arriero.runner.prefix.store import Reuse

if TYPE_CHECKING:
    from arriero.runner.prefix.reading import Reading
    from arriero.runner.sampling.constraint import Constraint
    from arriero.runner.speculation.session import Session
    from arriero.runner.speculation.stats import Tally


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
        "constraint",
        "decode_started_at",
        "generated",
        "id",
        "images",
        "keys",
        "last_token_at",
        "leader",
        "lookahead",
        "max_new",
        "outputs",
        "phase",
        "position",
        "prompt",
        "reading",
        "request",
        "reserved",
        "reuse",
        "sampled",
        "session",
        "shared",
        "slot",
        "stop_ids",
        "tally",
        "undo",
    )

    def __init__(
        self, request: Submit, max_new: int, reserved: int, images: RowImages | None = None, lookahead: int = 0
    ) -> None:
        """`lookahead`: 1 where what is stored of a position depends on the token after it, too."""
        self.id = request.id
        self.request = request
        self.prompt = np.array(request.tokens, np.int32)
        media = [Media(image.offset, image.end, image.patches.identity) for image in request.images]
        self.lookahead = lookahead
        self.keys = row_keys(self.prompt, media, lookahead)
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
        self.reading: Reading | None = None
        """What is being read from disk for it; None before that was looked for, and once it is admitted."""
        self.caches: RowCaches = []
        self.position = 0
        """Tokens forwarded (or dispatched) so far = the position that the next one takes."""
        self.sampled = 0
        """Tokens whose sampling was dispatched; one ahead of `generated` in a running pipeline."""
        self.slot: int | None = None
        """Its index among the decoding rows of the latest forward; None where the host knows its next token."""
        self.generated = 0
        """Tokens read on the host and delivered."""
        self.outputs: list[int] = []
        """Every token read, the one that stopped the row included: what stands in the caches behind the prompt."""
        self.session: Session | None = None
        """What a draft knows of it; None without a draft."""
        self.constraint: Constraint | None = None
        """What its grammar lets it say; None for a free reply."""
        self.tally: Tally | None = None
        """How its drafts did; None where nothing could draft."""
        self.undo: list[tuple[int, Snapshot | None]] = []
        """States before the latest step, by slot, of caches that can't go back by themselves."""
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

    @property
    def held(self) -> RowCaches:
        """All of its caches, its draft's behind the target's."""
        return self.caches if self.session is None else [*self.caches, *self.session.caches]

    @property
    def known(self) -> int:
        """Tokens that the host knows."""
        return len(self.prompt) + len(self.outputs)

    @property
    def next_token(self) -> int:
        """The last of them."""
        return self.outputs[-1] if self.outputs else int(self.prompt[-1])

    def tokens(self, start: int, end: int) -> np.ndarray:
        """Known tokens `[start, end)`, int32; fewer where not so many are known."""
        behind = len(self.prompt)
        if end <= behind:
            return self.prompt[start:end]
        outputs = np.array(self.outputs[max(start - behind, 0) : end - behind], np.int32)
        return outputs if start >= behind else np.concatenate([self.prompt[start:], outputs])

    def all_keys(self) -> Keys:
        """The keys of the prompt and of every token read."""
        if not self.lookahead:
            return np.concatenate([self.keys, row_keys(self.outputs)])
        last = self.keys[-1:] & UNKNOWN if len(self.keys) else row_keys(self.prompt[-1:])
        behind = np.concatenate([last, row_keys(self.outputs), [UNKNOWN]])
        return np.concatenate([self.keys, paired(behind)])

    def admit(self, reuse: Reuse, slots: int) -> None:
        """Start: from here the row owns memory. Of the caches the first `slots` are the target's."""
        # What is left of the pixels is in `images`, which forgets them one by one.
        self.request = msgspec.structs.replace(self.request, images=[])
        self.reuse = reuse
        self.leader = self.reading = None
        self.caches = reuse.caches[:slots]
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

    def tokens_read(self, count: int) -> None:
        """Count delivered tokens."""
        self.generated += count
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
            speculation=None if self.tally is None else self.tally.message(),
        )

    def end(self) -> None:
        """Let go of the caches, which the prefix store has taken over; a forward still running keeps what it reads."""
        self.phase = Phase.DONE
        self.caches = []
        self.session = None
        self.undo = []


def reserved_bytes(tokens: int, *facts: ModelFacts | DraftFacts) -> int:
    """Bytes that a row of `tokens` positions may grow to in a model and its draft, caches rounded up to their growth
    step.
    """
    return sum(grown(tokens) * each.cache_bytes_per_token + each.cache_bytes_fixed for each in facts)
