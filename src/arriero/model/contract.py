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
class Span:
    """The tokens of one row in a packed batch."""

    start: int
    """Index of its first token on the packed axis."""
    length: int
    position: int
    """Absolute position of its first token in the row."""
    caches: Sequence[Cache | None]
    """The row's caches; `caches[slot].offset == position` before the forward."""
    layout: Any = None
    """Positions of several axes for rows with images (None = text)."""


@dataclass(slots=True)
class Batch:
    """One forward: packed tokens `[T]` int32 (may be lazy) and the spans that they belong to, in order."""

    tokens: mx.array
    spans: Sequence[Span]
    taps: Sequence[int] = ()
    """Layers whose output a draft wants (id i = hidden after layer i)."""
    features: Sequence[Any] = ()
    """Embedding rows that replace tokens (images)."""
    memo: dict[Any, Any] = field(default_factory=dict)
    """What all layers of one forward share: masks, positions, rope tables."""

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

        The first reading waits until lazy tokens are computed: the next forward is then built after the last sample
        instead of beside it. Models that don't ask never pay.
        """
        if "ids" not in self.memo:
            self.memo["ids"] = np.array(self.tokens.astype(mx.int32))
        ids: np.ndarray = self.memo["ids"]
        return ids

    def caches(self, slot: int) -> list[Any]:
        """The cache of one slot for every span, in span order."""
        return [span.caches[slot] for span in self.spans]


@dataclass(slots=True)
class Hidden:
    """What a forward returns: final-normed states `[T, hidden]` and, if asked, taps `[T, taps · hidden]`."""

    final: mx.array
    taps: mx.array | None = None


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


class Draft(Protocol):
    """Proposes tokens for a target, with the distribution that each was drawn from (see docs/speculation.md)."""

    @classmethod
    def load(cls, checkpoint: Checkpoint, target: Model, dtype: mx.Dtype) -> Self: ...

    def new_caches(self) -> RowCaches: ...
