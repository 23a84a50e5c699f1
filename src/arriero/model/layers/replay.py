"""Decode forwards of one form as one compiled graph on NVIDIA GPUs.

Building a forward layer by layer costs the host more than a GPU needs to compute it. What changes from one decode step
to the next are tokens, positions, the tables that say where rows stand, and the caches' buffers: a forward is recorded
with these as inputs, once for each form, and replayed by MLX. Positions and tables of the next step are counted up on
the device: arrays that the host has just made cost each step a fifth of a millisecond in page faults (H200). A form is
how many tokens each row brings, and where the caches' buffers begin and end, which changes only as they grow.

States of recurrences are inputs and outputs of a recording: new arrays each time, so that snapshots keep theirs. What
the host looks up by the tokens' ids is an input too.

Only a forward whose every memory is such a state, or is read by kernels that take positions from those tables, can be
replayed. A model that does otherwise is found out while it is recorded, and runs layer by layer from then on.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, TypeGuard

import mlx.core as mx
import numpy as np

from arriero.kernels import device
from arriero.kernels.attention_part import NotReplayable
from arriero.kernels.cuda import attention as cuda
from arriero.kernels.cuda.source import argument
from arriero.model.contract import Batch, Hidden, Span
from arriero.model.layers.rope import Rope
from arriero.runner.caches.linear import LinearCache
from arriero.runner.caches.state import NGramCache, RecurrentCache

log = logging.getLogger(__name__)

FORMS = 16
"""Recordings that are kept: rows that grow at different times need new ones."""
LONGEST = 16
"""Tokens of a row beyond which a forward is a prompt's, whose form seldom comes again."""
WORTH = 3
"""Ordinary forwards of a form with several tokens a row before one is recorded: recording takes as long as some."""

FURTHEST = 32
"""Tokens by which rows may have moved together since the step before for their places to be made of its places."""
STEP = [0, 0, 1, 0, 1, 0, 0, 0]
"""What one token adds to a group, as attention.cu names its numbers."""

BUILT_FIRST = True
"""Whether the host waits for ids and looks up rows when a forward is built already, while the device still computes the
one before. What computes a forward as it is built must have them first.
"""

Form = tuple[Any, ...]

Replayed = LinearCache | RecurrentCache | NGramCache
"""Memories that a recording can stand for."""


Contexts = Sequence[Sequence[np.ndarray]]
"""Of each span the ids int32 that its cache of n-grams has after each stop and at the end."""


@dataclass(frozen=True, eq=False, slots=True)
class Hosted:
    """What the host has found for the tokens of a forward, for one slot of n-grams."""

    rows: mx.array
    """`[T, width]`."""
    contexts: Contexts


@dataclass(frozen=True, eq=False, slots=True)
class Coming:
    """What the host will have found by the time a forward is computed: the forward can be built before."""

    place: mx.array
    """Where the host puts it."""
    decode: Callable[[mx.array], mx.array]
    """Makes rows `[T, width]` of that; the same for all forwards of a form."""
    fill: Callable[[], Contexts]
    """Waits for the tokens' ids, and puts it there."""


def hosted_key(slot: int) -> tuple[str, int]:
    """Where in a forward's memo it is, if it is known before the forward is built."""
    return "looked up", slot


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


class _StateSlot:
    """Stands for the cache of a recurrence while a forward is recorded."""

    def __init__(self, arrays: tuple[mx.array, ...], stops: tuple[int, ...]) -> None:
        self._arrays = arrays
        self._stops = stops
        self.made: list[tuple[mx.array, ...]] = []
        """What the layer has put."""
        self.alone = False
        """Whether the last of them has memory of its own."""

    def get(self) -> tuple[mx.array, ...]:
        """The recorded inputs."""
        return self._arrays

    def splits(self, length: int) -> list[int]:
        """Those that the form says."""
        return list(self._stops)

    def put(self, states: Sequence[Sequence[mx.array]], length: int, *, alone: bool = False) -> None:
        """Outputs of the recording, which the real cache is given afterwards."""
        self.made = [tuple(state) for state in states]
        self.alone = alone

    def put_ids(self, contexts: Sequence[np.ndarray], tails: Sequence[mx.array], length: int) -> None:
        """Outputs of the recording; what the ids are, the host says each time."""
        self.made = [(tail,) for tail in tails]

    def __getattr__(self, name: str) -> Any:
        raise NotReplayable(f"a recurrence asks its cache for {name}")


Key = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Tokens of a group, bases and capacities: what tables of groups differ by."""

Held = tuple[mx.array, mx.array, int | tuple[int, ...]]
"""A cache's buffers, and the position of their first place; or the arrays of a state, and its stops."""


@dataclass(slots=True)
class _Seen:
    """What an ordinary forward of a form left behind."""

    ropes: list[Rope]
    tables: list[Key]
    times: int = 1
    run: Callable[[list[mx.array]], list[mx.array]] | None = None
    alone: bool = False
    """Whether the states that a recording gives have memory of their own."""
    head_input: bool = False
    """Whether it gives what a head for drafts takes."""


@dataclass(frozen=True, slots=True)
class _Places:
    """Where rows stand, on the device: positions `[T]` int32 and the tables of groups."""

    form: Form
    positions: list[int]
    """Of each row, on the host."""
    arrays: list[mx.array]


@dataclass(frozen=True, slots=True)
class _Steady:
    """A replayed step of rows whose memories hold keys and values, or, where each row has one token, states."""

    form: Form
    seen: _Seen
    run: Callable[[list[mx.array]], list[mx.array]]
    layouts: list[tuple[int, int] | None]
    """Of every row's cache, slot by slot; None for those of states."""


class Replay:
    """The forwards of one model."""

    def __init__(self, forward: Callable[[Batch], Hidden]) -> None:
        """`forward` builds one layer by layer."""
        self._forward = forward
        self._forms: OrderedDict[Form, _Seen] = OrderedDict()
        self._next: _Places | None = None
        self._steps: dict[int, tuple[mx.array, mx.array]] = {}
        """What so many tokens add to positions and to a group, on the device."""
        self._steady: dict[tuple[Sequence[int], Sequence[int]], _Steady] = {}
        """The latest of each number of tokens of each row, and of each set of taps."""
        self._refused = False

    def possible(self, batch: Batch) -> bool:
        """Whether a forward may be replayed, so that what it needs of the host is worth looking up at once."""
        return not self._refused and _replayable(batch)

    def __call__(self, batch: Batch, coming: Callable[[], Mapping[int, Coming]] = dict) -> Hidden:
        """The forward, replayed where one of its form was seen before.

        `coming` gives, for each slot of n-grams, what the host looks up; it is filled in once the forward is built.
        """
        again = self._again(batch)
        if again is not None:
            return again
        if not self.possible(batch):
            return self._forward(batch)
        slots = range(len(batch.spans[0].caches))
        caches: list[list[Replayed]] = [batch.caches(slot) for slot in slots]
        # Room is made first, so that the form is that of the buffers as they will be.
        lengths = [span.length for span in batch.spans]
        buffers = [_held(of_slot, lengths) for of_slot in caches]
        form = tuple(lengths), tuple(batch.taps), tuple(map(_layout, caches, buffers))
        seen = self._forms.get(form) or self._grown(form, [_linear(of_slot) for of_slot in caches])
        if seen is None:
            return self._first(form, batch)
        self._forms.move_to_end(form)
        if seen.run is None and seen.times < WORTH and len(batch.spans) < batch.tokens.shape[0]:
            seen.times += 1
            return self._forward(batch)
        hosted = coming()
        if seen.run is None:
            seen.run = self._recorded(batch, buffers, seen, hosted)
        contexts = {} if BUILT_FIRST else {slot: one.fill() for slot, one in hosted.items()}
        places = self._places(form, batch, seen)
        furthest = max(span.position + span.length for span in batch.spans)
        held = [rope.held(furthest) for rope in seen.ropes]
        try:
            final, *rest = seen.run(
                [
                    *(batch.tokens, *places, *held, *(one.place for one in hosted.values())),
                    *(part for of in buffers for first, second, _ in of for part in (first, second)),
                ]
            )
        except NotReplayable as reason:
            log.info("decode steps are built layer by layer: %s", reason)
            self._refused = True
            self._forms.clear()
            self._steady.clear()
            return self._forward(batch)
        contexts = contexts or {slot: one.fill() for slot, one in hosted.items()}
        before = [span.position for span in batch.spans]
        after = [span.position + span.length for span in batch.spans]
        made = self._hidden(final, rest, batch, seen)
        left = iter(rest)
        for slot, (of_slot, held_of) in enumerate(zip(caches, buffers, strict=True)):
            if _linear(of_slot):
                for keys_of, length in zip(of_slot, lengths, strict=True):
                    keys_of.commit_in_place(length, final)
                continue
            for row, (span, cache, (_, _, where)) in enumerate(zip(batch.spans, of_slot, held_of, strict=True)):
                assert not isinstance(where, int)
                if isinstance(cache, NGramCache):
                    tails = [next(left) for _ in range(len(where) + 1)]
                    cache.put_ids(contexts[slot][row], tails, span.length)
                else:
                    assert isinstance(cache, RecurrentCache)
                    states = [(next(left), next(left)) for _ in range(len(where) + 1)]
                    cache.advance(states, span.length, alone=seen.alone)
        found = list(left)
        self._next = _Places(form, after, found) if found else _Places(form, before, places)
        if all(_linear(of) or (not isinstance(of[0], NGramCache) and max(lengths) == 1) for of in caches):
            layouts = [one if _linear(of) else None for of, them in zip(caches, form[2], strict=True) for one in them]
            if len(self._steady) >= FORMS:
                self._steady.clear()
            self._steady[form[0], form[1]] = _Steady(form, seen, seen.run, layouts)
        return made

    def _again(self, batch: Batch) -> Hidden | None:
        """The forward where it is a step like the latest one of so many tokens, without asking for its form."""
        spans = batch.spans
        lengths = tuple(span.length for span in spans)
        steady = self._steady.get((lengths, tuple(batch.taps)))
        if steady is None or self._refused or batch.features or any(span.layout is not None for span in spans):
            return None
        caches = [cache for of_slot in zip(*(span.caches for span in spans), strict=True) for cache in of_slot]
        buffers: list[mx.array] = []
        for cache, length, layout in zip(caches, cycle(lengths), steady.layouts, strict=False):
            held = cache.get() if layout is None else cache.still_in_place(length, layout)
            if held is None:
                return None
            buffers += held
        places = self._places(steady.form, batch, steady.seen)
        after = [span.position + span.length for span in spans]
        ropes = [rope.held(max(after)) for rope in steady.seen.ropes]
        final, *rest = steady.run([batch.tokens, *places, *ropes, *buffers])
        made = self._hidden(final, rest, batch, steady.seen)
        left = iter(rest)
        for cache, length, layout in zip(caches, cycle(lengths), steady.layouts, strict=False):
            if layout is None:
                cache.advance([(next(left), next(left))], 1, alone=steady.seen.alone)
            else:
                cache.commit_in_place(length, final)
        found = list(left)
        self._next = _Places(steady.form, after if found else [span.position for span in spans], found or places)
        return made

    @staticmethod
    def _hidden(final: mx.array, rest: list[mx.array], batch: Batch, seen: _Seen) -> Hidden:
        """What a recording gives first, taken off the rest."""
        taps = rest.pop(0) if batch.taps else None
        head_input = rest.pop(0) if seen.head_input else None
        return Hidden(final, taps, head_input)

    def _first(self, form: Form, batch: Batch) -> Hidden:
        """A form that is new runs as ever, and shows which ropes and tables it needs."""
        made = self._forward(batch)
        keys = [key for key in batch.memo if isinstance(key, tuple)]
        self._forms[form] = _Seen(
            [key[1] for key in keys if key[0] == "rope"], [key[1:] for key in keys if key[0] == cuda.GROUPS]
        )
        self._forget()
        return made

    def _grown(self, form: Form, linear: Sequence[bool]) -> _Seen | None:
        """What is known of a new form by another of the same tokens, whose buffers began and ended elsewhere."""
        lengths, taps, layouts = form
        for (of_lengths, of_taps, others), seen in reversed(self._forms.items()):
            if (of_lengths, of_taps, len(others)) != (lengths, taps, len(layouts)):
                continue
            moved: dict[Any, Any] = {}
            # Slots that shared a table must do so still, and states stop where they did.
            alike = all(
                moved.setdefault(_edges(before), _edges(after)) == _edges(after) if buffers else before == after
                for before, after, buffers in zip(others, layouts, linear, strict=True)
            )
            tables = [(key[0], *moved[key[1:]]) for key in seen.tables if key[1:] in moved]
            if alike and len(tables) == len(seen.tables):
                found = self._forms[form] = _Seen(seen.ropes, list(dict.fromkeys(tables)))
                self._forget()
                return found
        return None

    def _forget(self) -> None:
        """Drop what was used longest ago."""
        if len(self._forms) > FORMS:
            self._forms.popitem(last=False)

    def _places(self, form: Form, batch: Batch, seen: _Seen) -> list[mx.array]:
        """Positions and tables: those that the step before left on the device, or new ones from the host."""
        lengths = [span.length for span in batch.spans]
        positions = [span.position for span in batch.spans]
        before, self._next = self._next, None
        if before is not None and before.form == form:
            moved = {now - then for now, then in zip(positions, before.positions, strict=True)}
            if moved == {0}:
                return before.arrays
            if len(moved) == 1 and abs(by := moved.pop()) <= FURTHEST:
                return self._moved(before.arrays, by)
        made = [argument(mx.array(batch.positions))]
        for tokens, bases, capacities in seen.tables:
            found = cuda.tables(lengths, positions, bases, capacities, tokens)
            made += [argument(mx.array(table)) for table in found]
        return made

    def _moved(self, arrays: Sequence[mx.array], by: int) -> list[mx.array]:
        """Positions and tables of the same rows so many tokens further."""
        if by not in self._steps:
            self._steps[by] = argument(mx.array([by], mx.int32))[:1], argument(mx.array(STEP) * by)[: len(STEP)]
            mx.eval(self._steps[by])
        one, step = self._steps[by]
        positions, *tables = arrays
        return [positions + one, *((of.reshape(-1, len(STEP)) + step).reshape(-1) for of in tables)]

    def _recorded(
        self, batch: Batch, buffers: Sequence[Sequence[Held]], seen: _Seen, hosted: Mapping[int, Coming]
    ) -> Callable[[list[mx.array]], list[mx.array]]:
        """The forward as a function of tokens, places, tables of angles, what the host found for slots, and buffers.

        Gives the final states, the taps and the head's input if there are any, states, and where each row has one token
        also the next places.
        """
        places = [[where for _, _, where in of_slot] for of_slot in buffers]
        shapes = [(span.start, span.length, span.position) for span in batch.spans]
        lengths = [length for _, length, _ in shapes]
        taps, total = tuple(batch.taps), sum(lengths)
        counts = [
            [len(t) for t in cuda.tables(lengths, [0] * len(lengths), [0] * len(lengths), capacities, tokens)]
            for tokens, _, capacities in seen.tables
        ]
        decoders = {slot: one.decode for slot, one in hosted.items()}
        steady = max(lengths) == 1
        step = argument(mx.array(STEP))
        mx.eval(step)

        def run(inputs: list[mx.array]) -> list[mx.array]:
            left = iter(inputs)
            tokens, positions = next(left), next(left)
            memo: dict[Any, Any] = {cuda.REPLAYED: True}
            groups = [[next(left) for _ in of] for of in counts]
            for key, arrays, of in zip(seen.tables, groups, counts, strict=True):
                memo[cuda.GROUPS, *key] = cuda.launched(lengths, arrays, of)
            for rope in seen.ropes:
                angles = memo["rope", rope] = mx.take(next(left), positions[:total], axis=0)
                cuda.give_angles(memo, angles)
            nothing: list[list[np.ndarray]] = [[] for _ in lengths]
            for slot, decode in decoders.items():
                memo[hosted_key(slot)] = Hosted(decode(next(left)), nothing)
            slots = [[_slot(next(left), next(left), where) for where in of_slot] for of_slot in places]
            spans = [
                Span(start, length, position, [of_slot[row] for of_slot in slots])
                for row, (start, length, position) in enumerate(shapes)
            ]
            made = self._forward(Batch(tokens, spans, taps, memo=memo))
            seen.head_input = made.head_input is not None
            outputs = [part for part in (made.final, made.taps, made.head_input) if part is not None]
            states = [slot for of_slot in slots for slot in of_slot if isinstance(slot, _StateSlot)]
            seen.alone = all(slot.alone for slot in states if len(slot.made[0]) > 1)
            outputs += [array for slot in states for state in slot.made for array in state]
            if steady:
                outputs.append(positions + 1)
                outputs += [(of.reshape(-1, len(STEP)) + step).reshape(-1) for arrays in groups for of in arrays]
            return outputs

        compiled: Callable[[list[mx.array]], list[mx.array]] = mx.compile(run)
        return compiled


def _linear(of_slot: Sequence[Replayed]) -> TypeGuard[Sequence[LinearCache]]:
    """Whether a slot holds keys and values; it is of one kind for all rows."""
    return isinstance(of_slot[0], LinearCache)


def _held(of_slot: Sequence[Replayed], lengths: Sequence[int]) -> Sequence[Held]:
    """What a slot's caches give a forward of so many tokens of each row."""
    if _linear(of_slot):
        return [cache.reserve_in_place(length) for cache, length in zip(of_slot, lengths, strict=True)]
    made: list[Held] = []
    for cache, length in zip(of_slot, lengths, strict=True):
        assert not isinstance(cache, LinearCache)
        tail, state = cache.get()
        made.append((tail, state, tuple(cache.splits(length))))
    return made


def _layout(of_slot: Sequence[Replayed], held: Sequence[Held]) -> tuple[Any, ...]:
    """What recordings differ by in a slot: where buffers begin and end, or where states stop."""
    if _linear(of_slot):
        return tuple(cache.layout for cache in of_slot)
    return tuple(where for _, _, where in held)


def _edges(layout: tuple[tuple[int, int], ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Bases and capacities of the rows' buffers of one slot, as tables are known by."""
    return tuple(base for base, _ in layout), tuple(capacity for _, capacity in layout)


def _slot(first: mx.array, second: mx.array, where: int | tuple[int, ...]) -> _Slot | _StateSlot:
    return _Slot(first, second, where) if isinstance(where, int) else _StateSlot((first, second), where)


def _replayable(batch: Batch) -> bool:
    """Whether this may be a decode step that only the kernels compute."""
    gpu = device.cuda()
    return (
        gpu is not None
        and gpu.in_place
        and not batch.features
        and max(span.length for span in batch.spans) <= LONGEST
        and batch.coordinates is None
        and all(issubclass(kind, Replayed) for kind in {type(c) for span in batch.spans for c in span.caches})
    )
