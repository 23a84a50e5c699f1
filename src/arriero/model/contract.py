"""The contract between the engine, the architectures and the caches.

A forward works on **packed tokens**: all rows' new tokens one after another on one axis `T`, no padding. Products,
norms and experts see `[T, hidden]`; only what has memory looks at the spans, through one function each in
`model/layers/`.

Refuses to know HTTP, text and sampling.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, runtime_checkable

import mlx.core as mx
import numpy as np

from arriero.image import ImagePatches, PlacedImage
from arriero.model.checkpoint import Checkpoint


class Snapshot(Protocol):
    """An immutable copy of a cache's state over `[start, end)`; may be lazy (a range of a live buffer)."""

    @property
    def start(self) -> int: ...

    @property
    def end(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Bytes that this snapshot owns; 0 while it is lazy."""
        ...

    def own(self) -> None:
        """Copy a lazy snapshot out of its live buffer (idempotent)."""
        ...


class Cache(Protocol):
    """What one layer remembers of one row. Every kind answers the same questions.

    Positions are absolute and start at 0. `offset` is the number of positions held, which is the position that the next
    write takes.
    """

    @property
    def offset(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Bytes of the live buffers."""
        ...

    def state(self) -> list[mx.array]:
        """Arrays that must be evaluated for this cache to be valid (empty when nothing is stored)."""
        ...

    def plan(self, offsets: Sequence[int]) -> None:
        """Schedule a capture as a write crosses each offset (ascending, unique, each ≥ `offset`).

        Raises ValueError for an offset already passed, an unordered list, or a schedule that was not drained.
        """
        ...

    def take(self) -> list[Snapshot | None]:
        """Drain the schedule: one entry per planned offset in order, None where nothing was captured."""
        ...

    def snapshot(self, start: int = 0) -> Snapshot | None:
        """A snapshot of `[start, offset)` at rest; None when empty. The live cache is unchanged."""
        ...

    def rewind(self, offset: int, snapshot: Snapshot | None = None) -> bool:
        """Go back to `offset`, by itself or with the help of a snapshot that ends there.

        False when the offset can't be reached that way; the cache is then unchanged and usable.
        """
        ...

    def restore(self, snapshot: Snapshot, offset: int | None = None) -> bool:
        """Continue from a snapshot, clamped to `offset`; False (and unchanged) when this can't be done."""
        ...

    def split(self, snapshot: Snapshot, at: int) -> tuple[Snapshot | None, Snapshot | None]:
        """Divide a snapshot at a position; kinds that hold one whole state return `(None, snapshot)`."""
        ...

    def merge(self, parent: Snapshot | None, child: Snapshot | None) -> Snapshot | None:
        """Join `[a, b)` and `[b, c)`; kinds that hold one whole state keep the child."""
        ...

    def free(self) -> None:
        """Drop live buffers and schedule; lazy snapshots are copied out first."""
        ...


RowCaches = list["Cache | None"]
"""One slot per memory of the model, in the model's own order; None for a stateless layer."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the tokens of a row with images stand on several axes (time, height, width).

    Behind the prompt all axes go on by one a token, from the furthest position that the prompt reached.
    """

    prompt: np.ndarray
    """int32 `[axes, prompt length]`."""
    shift: int
    """What a position behind the prompt is off its index."""

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Coordinates int32 `[axes, n]` of absolute positions `[n]`."""
        length = self.prompt.shape[1]
        if positions.size and positions[-1] < length:
            inside: np.ndarray = self.prompt[:, positions]
            return inside
        held = self.prompt[:, np.minimum(positions, length - 1)]
        return np.where(positions < length, held, positions + self.shift).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Features:
    """Rows that take the place of tokens' embeddings in a packed batch."""

    start: int
    """Index of the first on the packed axis."""
    rows: mx.array
    """`[n, hidden]`, as the first layer takes them (no embedding scale)."""


class Vision(Protocol):
    """What turns images into embeddings: `Model.vision` of a model that has it."""

    @property
    def atomic(self) -> bool:
        """Whether the tokens of an image see each other, so that no chunk may cut it."""
        ...

    def check(self, patches: ImagePatches) -> None:
        """InvalidRequest for patches that are not of this tower's form."""
        ...

    def encode(self, patches: ImagePatches) -> mx.array:
        """Embeddings `[tokens, hidden]` of one image, the last step lazy; nothing but the image decides their bits."""
        ...

    def layout(self, length: int, images: Sequence[PlacedImage]) -> Layout | None:
        """Positions of a prompt of `length` tokens with these images; None where they are the indices."""
        ...


def vision_of(model: Model) -> Vision | None:
    """The model's tower for images; None where it has none."""
    found: Vision | None = getattr(model, "vision", None)
    return found


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens of one row in a packed batch."""

    start: int
    """Index of its first token on the packed axis."""
    length: int
    position: int
    """Absolute position of its first token in the row."""
    caches: Sequence[Cache | None]
    """The row's caches; `caches[slot].offset == position` before the forward."""
    layout: Layout | None = None
    """Positions on several axes for rows with images (None = text, or a model that doesn't ask)."""


@dataclass(slots=True)
class Batch:
    """One forward: packed tokens `[T]` int32 (may be lazy) and the spans that they belong to, in order."""

    tokens: mx.array
    spans: Sequence[Span]
    taps: Sequence[int] = ()
    """Layers whose output a draft wants (id i = hidden after layer i)."""
    features: Sequence[Features] = ()
    """Embedding rows that replace tokens (images), in order."""
    memo: dict[Any, Any] = field(default_factory=dict)
    """What all layers of one forward share: masks, positions, rope tables."""

    @classmethod
    def of(cls, ids: np.ndarray, spans: Sequence[Span]) -> Self:
        """A batch of ids int32 `[T]` that the host knows."""
        return cls(mx.array(ids), spans, memo={"ids": ids})

    @property
    def positions(self) -> np.ndarray:
        """Absolute position of every packed token, int32 `[T]`."""
        if "positions" not in self.memo:
            parts = [np.arange(s.position, s.position + s.length, dtype=np.int32) for s in self.spans]
            self.memo["positions"] = np.concatenate(parts) if parts else np.zeros(0, np.int32)
        positions: np.ndarray = self.memo["positions"]
        return positions

    @property
    def ids(self) -> np.ndarray:
        """The packed tokens on the host, int32 `[T]`, for what is looked up by id outside the device.

        A batch made with `of` has them. Else the first reading waits until lazy tokens are computed: the next forward
        is then built after the last sample instead of beside it. Models that don't ask never pay.
        """
        if "ids" not in self.memo:
            self.memo["ids"] = np.array(self.tokens.astype(mx.int32))
        ids: np.ndarray = self.memo["ids"]
        return ids

    @property
    def coordinates(self) -> np.ndarray | None:
        """Positions on every axis, int32 `[axes, T]`; None where no span has more than one."""
        if "coordinates" not in self.memo:
            layouts = [span.layout for span in self.spans if span.layout is not None]
            found = None
            if layouts:
                found = np.repeat(self.positions[None], layouts[0].prompt.shape[0], axis=0)
                for span in self.spans:
                    if span.layout is not None:
                        part = slice(span.start, span.start + span.length)
                        found[:, part] = span.layout.at(self.positions[part])
            self.memo["coordinates"] = found
        coordinates: np.ndarray | None = self.memo["coordinates"]
        return coordinates

    def caches(self, slot: int) -> list[Any]:
        """The cache of one slot for every span, in span order."""
        return [span.caches[slot] for span in self.spans]


@dataclass(slots=True)
class Hidden:
    """What a forward returns: final-normed states `[T, hidden]` and, if asked, taps `[T, taps · hidden]`."""

    final: mx.array
    taps: mx.array | None = None
    head_input: mx.array | None = None
    """What the model's own head for drafts takes where that is not `final`: `[T, width]`."""

    @property
    def for_head(self) -> mx.array:
        """What the model's own head for drafts takes, and a draft that asks for no taps."""
        return self.final if self.head_input is None else self.head_input


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the engine and `show` need to know about a loaded model."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: int
    context_length: int
    dtype: mx.Dtype
    cache_bytes_per_token: int
    """Upper bound over all layers that grow with the row."""
    cache_bytes_fixed: int = 0
    """Bytes of the states of a row that don't grow."""
    embedding_scale: float = 1.0
    """What the model multiplies the rows of `embed` by before its first layer."""


@runtime_checkable
class Model(Protocol):
    """A loaded architecture."""

    facts: ModelFacts

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: mx.Dtype) -> Self:
        """Build from a checkpoint with activations of `dtype`; raises CheckpointError naming the tensor."""
        ...

    def new_caches(self) -> RowCaches:
        """Fresh caches for a row."""
        ...

    def forward(self, batch: Batch) -> Hidden:
        """Run the packed tokens; appends to the spans' caches."""
        ...

    def logits(self, hidden: mx.array) -> mx.array:
        """`[n, hidden]` → logits `[n, vocab]` as the model defines them (scale, soft cap, suppressed ids)."""
        ...

    def embed(self, tokens: mx.array) -> mx.array:
        """Token embeddings `[n, hidden]` as a draft needs them (raw table rows, no scale)."""
        ...

    def raw_logits(self, hidden: mx.array) -> mx.array:
        """Head product without decoration, for drafts."""
        ...

    def parameters(self) -> Iterable[mx.array]:
        """Every array that the model owns (weights are evaluated and counted through this)."""
        ...


@dataclass(frozen=True, slots=True)
class EncoderFacts:
    """What the runner needs to know about a loaded encoder."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: int
    context_length: int
    """Tokens of a text at most, special ones included."""
    dtype: mx.Dtype


@runtime_checkable
class Encoder(Protocol):
    """A loaded architecture that reads whole texts and writes none: for embeddings."""

    facts: EncoderFacts

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: mx.Dtype) -> Self:
        """Build from a checkpoint with activations of `dtype`; raises CheckpointError naming the tensor."""
        ...

    def encode(self, tokens: mx.array, lengths: Sequence[int]) -> mx.array:
        """Final states `[T, hidden]` of texts of `lengths`, packed one behind another, `tokens` int32 `[T]`.

        No text sees another.
        """
        ...

    def finish(self, pooled: mx.array) -> mx.array:
        """The vectors of texts, of what pooling made of their states, float32 `[n, hidden]`."""
        ...

    def parameters(self) -> Iterable[mx.array]:
        """Every array that the encoder owns."""
        ...


@dataclass(frozen=True, slots=True)
class DraftFacts:
    """What the engine needs to know about a loaded draft."""

    architecture: str
    limit: int | None
    """Tokens that one `propose` can give; None where each is a step of its own and any number goes."""
    taps: tuple[int, ...] = ()
    """Layers of the target whose outputs it takes (`Batch.taps`); empty: it takes `Hidden.for_head`."""
    lookahead: int = 0
    """1 where position p of its caches also holds the token at p + 1: it is one token behind until that is known."""
    conditional: bool = True
    """Whether each token's scores take the tokens before it into account; else the rows of a block are guessed apart,
    and drawing each by chance gives text that does not hang together."""
    whole: bool = False
    """Always asked for `limit` tokens: fewer lose more than they save."""
    reads_target: bool = False
    """Owns no caches: its spans carry the target's, which it only reads."""
    state_width: int = 0
    """Numbers that it takes of one position; 0 = the target's hidden size, for each tap if there are several."""
    cache_bytes_per_token: int = 0
    cache_bytes_fixed: int = 0


class Pick(Protocol):
    """Chooses tokens by a draft's scores, and remembers the distribution that each was drawn from.

    Called in order, once for each step, with the scores of one or more rows: float `[n, m]` over the tokens `ids`
    int32 `[n, m]`, or over the whole vocabulary. Scores are logits before any temperature; among equal ones the first
    is greedy's. Returns one token a row, int32 `[n]`, lazily. Nothing but what it returns conditions later scores, so
    what it remembers is the draft's law.
    """

    def __call__(self, scores: mx.array, ids: mx.array | None = None) -> mx.array: ...


@runtime_checkable
class ReadsAhead(Protocol):
    """A model that looks rows up in files by token ids, and can begin before the forward that needs them."""

    def read_ahead(self, coming: Sequence[tuple[np.ndarray, int]]) -> None:
        """Say which prompt tokens the next forward is going to take: per row all ids up to there, and how many are new.

        Returns at once; the reading goes on beside whatever the device computes. A wrong guess costs reads, and
        changes no bit of a result.
        """
        ...


class Draft(Protocol):
    """Proposes tokens for a target, with the distribution that each was drawn from.

    Position p of a draft's caches belongs to position p of the row. Their offset is the number of positions that the
    draft knows, and only committed positions are ever in them: `propose` leaves what it guessed out. So a rejection
    needs nothing of the draft, and rewinding or restoring it is rewinding or restoring its caches to the length of the
    target's, as `Cache` says.

    A round of speculation, n positions being in the target's caches and the token at n, the *anchor*, being known:

    1. `propose` gets the states of the positions that the draft doesn't know yet, `[caches' offset, n)`, and gives up
       to `limit` tokens for positions n + 1, n + 2, …
    2. The target's forward over anchor and tokens judges them. Of its rows the first 1 + accepted stay, their states
       (`Hidden.taps`, or `Hidden.for_head`) are what the next `propose` or `commit` gets.

    While nothing is drafted (prompts, other rows running), `commit` keeps the caches level, with any number of rows and
    in any chunks; the results don't depend on them. A batch's `positions` are those of its states. Its tokens are those
    at `position + lookahead`: with a look-ahead of 1 the last position waits for the token behind it, and in `propose`
    the last token is the anchor. No captures may be planned past the committed length during a `propose`.

    Everything is lazy. What `propose` returns is evaluated before the caches are written again, and a row that only
    commits has its caches' `state()` evaluated now and then, or its graph grows with the text.
    """

    facts: DraftFacts

    def new_caches(self) -> RowCaches:
        """Fresh caches for a row; empty for a draft that reads the target's."""
        ...

    def commit(self, batch: Batch, states: mx.array) -> None:
        """Take in the target's `states` `[T, width]` at the batch's positions; appends to the spans' caches."""
        ...

    def propose(self, batch: Batch, states: mx.array, anchor: mx.array, count: int, pick: Pick) -> mx.array:
        """Take in what `commit` would, then guess the `count` tokens behind `anchor` (int32 `[1]`), for one row.

        The batch has one span, which may be empty where there is no look-ahead. Returns int32 `[count]`, lazily, chosen
        by `pick`. ValueError for several spans or a count that is not within 1 and the limit.
        """
        ...

    def parameters(self) -> Iterable[mx.array]:
        """Every array that the draft owns, none of the target's."""
        ...
