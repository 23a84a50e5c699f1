"""Decode forwards of one form as one compiled graph on NVIDIA GPUs.

Building a forward layer by layer costs the host more than a GPU needs to compute it. What changes from one decode step
to the next are tokens, angles, the tables that say where rows stand, and the caches' buffers: a forward is recorded
with these as inputs, once for each form, and replayed by MLX. A form is how many tokens each row brings, and where the
caches' buffers begin and end, which changes only as they grow.

Only a forward whose every memory is read by kernels that take positions from those tables can be replayed. A model that
does otherwise is found out while it is recorded, and runs layer by layer from then on.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from arriero.kernels import device
from arriero.kernels.attention_part import NotReplayable
from arriero.kernels.cuda import attention as cuda
from arriero.model.contract import Batch, Hidden, Span
from arriero.model.layers.rope import Rope
from arriero.runner.caches.linear import LinearCache

log = logging.getLogger(__name__)

FORMS = 16
"""Recordings that are kept: rows that grow at different times need new ones."""

Form = tuple[Any, ...]


class _Slot:
    """Stands for a cache while a forward is recorded."""

    def __init__(self, keys: mx.array, values: mx.array, base: int) -> None:
        self._buffers = keys, values, base

    def reserve(self, length: int) -> tuple[mx.array, mx.array, int]:
        """The recorded inputs; the real cache has made room."""
        return self._buffers

    def commit(self, keys: mx.array, values: mx.array, length: int) -> None:
        """Nothing: the kernels have written into the buffers, and the real cache is told afterwards."""

    def __getattr__(self, name: str) -> Any:
        raise NotReplayable(f"a layer asks its cache for {name}")


@dataclass(slots=True)
class _Seen:
    """What an ordinary forward of a form left behind."""

    ropes: list[Rope]
    tables: list[tuple[int, tuple[int, ...], tuple[int, ...]]]
    """Tokens, bases and capacities of each of the tables."""
    run: Callable[[list[mx.array]], list[mx.array]] | None = None


class Replay:
    """The forwards of one model."""

    def __init__(self, forward: Callable[[Batch], Hidden]) -> None:
        """`forward` builds one layer by layer."""
        self._forward = forward
        self._forms: OrderedDict[Form, _Seen] = OrderedDict()
        self._refused = False

    def __call__(self, batch: Batch) -> Hidden:
        """The forward, replayed where one of its form was seen before."""
        if self._refused or not _replayable(batch):
            return self._forward(batch)
        caches = [list(batch.caches(slot)) for slot in range(len(batch.spans[0].caches))]
        # Room is made first, so that the form is that of the buffers as they will be.
        buffers = [
            [cache.reserve(span.length) for span, cache in zip(batch.spans, of_slot, strict=True)] for of_slot in caches
        ]
        form = _form(batch, buffers)
        seen = self._forms.get(form)
        if seen is None:
            return self._first(form, batch)
        self._forms.move_to_end(form)
        if seen.run is None:
            seen.run = self._recorded(batch, buffers, seen)
        inputs = _inputs(batch, buffers, seen)
        try:
            outputs = seen.run(inputs)
        except NotReplayable as reason:
            log.info("decode steps are built layer by layer: %s", reason)
            self._refused = True
            self._forms.clear()
            return self._forward(batch)
        filled = iter(mx.depends(inputs[-sum(2 * len(of_slot) for of_slot in buffers) :], [outputs[0]]))
        for of_slot in caches:
            for span, cache in zip(batch.spans, of_slot, strict=True):
                cache.commit(next(filled), next(filled), span.length)
        return Hidden(outputs[0], outputs[1] if batch.taps else None)

    def _first(self, form: Form, batch: Batch) -> Hidden:
        """A form that is new runs as ever, and shows which ropes and tables it needs."""
        made = self._forward(batch)
        self._forms[form] = _Seen(
            [key[1] for key in batch.memo if isinstance(key, tuple) and key[0] == "rope"],
            [key[1:] for key in batch.memo if isinstance(key, tuple) and key[0] == cuda.GROUPS and len(key) == 4],
        )
        if len(self._forms) > FORMS:
            self._forms.popitem(last=False)
        return made

    def _recorded(
        self, batch: Batch, buffers: list[list[tuple[mx.array, mx.array, int]]], seen: _Seen
    ) -> Callable[[list[mx.array]], list[mx.array]]:
        """The forward as a function of its inputs, in the order of `_inputs`."""
        bases = [[base for _, _, base in of_slot] for of_slot in buffers]
        shapes = [(span.start, span.length, span.position) for span in batch.spans]
        counts = [-(-len(shapes) // cuda.ROWS) for _ in seen.tables]
        taps = tuple(batch.taps)

        def run(inputs: list[mx.array]) -> list[mx.array]:
            left = iter(inputs)
            tokens = next(left)
            memo: dict[Any, Any] = {cuda.REPLAYED: True}
            for rope in seen.ropes:
                memo["rope", rope] = next(left)
            for key, count in zip(seen.tables, counts, strict=True):
                memo[cuda.GROUPS, *key] = [next(left) for _ in range(count)]
            slots = [[_Slot(next(left), next(left), base) for base in of_slot] for of_slot in bases]
            spans = [
                Span(start, length, position, [of_slot[row] for of_slot in slots])
                for row, (start, length, position) in enumerate(shapes)
            ]
            made = self._forward(Batch(tokens, spans, taps, memo=memo))
            return [made.final] if made.taps is None else [made.final, made.taps]

        compiled: Callable[[list[mx.array]], list[mx.array]] = mx.compile(run)
        return compiled


def _replayable(batch: Batch) -> bool:
    """Whether this may be a decode step that only the kernels compute."""
    gpu = device.cuda()
    return (
        gpu is not None
        and gpu.in_place
        and not batch.features
        and max(span.length for span in batch.spans) <= cuda.LONGEST
        and batch.coordinates is None
        and all(isinstance(cache, LinearCache) for span in batch.spans for cache in span.caches)
    )


def _form(batch: Batch, buffers: list[list[tuple[mx.array, mx.array, int]]]) -> Form:
    """What recordings differ by. Spans are packed one after another, so their lengths say where they begin."""
    layouts = tuple(tuple((base, keys.shape[2]) for keys, _, base in of_slot) for of_slot in buffers)
    return tuple(span.length for span in batch.spans), tuple(batch.taps), layouts


def _inputs(batch: Batch, buffers: list[list[tuple[mx.array, mx.array, int]]], seen: _Seen) -> list[mx.array]:
    """Tokens, angles, tables, buffers."""
    lengths = [span.length for span in batch.spans]
    positions = [span.position for span in batch.spans]
    made = [batch.tokens, *(rope.angles(batch) for rope in seen.ropes)]
    for tokens, bases, capacities in seen.tables:
        made += [mx.array(table) for table in cuda.tables(lengths, positions, bases, capacities, tokens)]
    for of_slot in buffers:
        for keys, values, _ in of_slot:
            made += (keys, values)
    return made
