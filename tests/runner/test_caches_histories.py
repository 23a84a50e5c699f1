"""Any history of a cache leaves what a fresh cache holds after the same stream, for every kind."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from arriero.kernels.append import graph
from arriero.runner.caches import linear
from tests.helpers.cache_streams import KINDS, in_place

APPENDS = {"of the device": linear.append, "plain": graph, "in place": in_place}
LENGTHS = (1, 1, 2, 5, 9, 30)
OPERATIONS = ("append", "append", "append", "plan", "take", "snapshot", "own", "rewind", "restore", "split", "merge")


@dataclass
class Live:
    """A cache, what it must hold, and what was planned on it."""

    cache: object
    stream: list[int] = field(default_factory=list)
    planned: list[int] = field(default_factory=list)
    cursor: int = 0
    abandoned: bool = False
    """After a rewind, offsets that were not crossed never are: they would join two histories."""
    reached: list[tuple[int, list[int]]] = field(default_factory=list)
    """For each planned offset that was crossed: where its capture starts, and the stream up to it."""


class History:
    def __init__(self, kind, chance: random.Random) -> None:
        self.kind = kind
        self.chance = chance
        self.rows = [Live(kind.new()), Live(kind.new())]
        self.stored: list[tuple[object, list[int]]] = []
        """Snapshots, each with the stream that it is of."""
        self.token = 0
        self.checks = chance.choice((0.1, 0.5, 1.0))
        """How often everything is compared: a comparison evaluates, so rare ones leave long lazy graphs."""

    def draw(self, low: int, high: int) -> int:
        return self.chance.randint(low, high)

    def run(self) -> None:
        for _ in range(40):
            row = self.rows[self.draw(0, 1)]
            operation = self.chance.choice((*OPERATIONS, "free", "drop"))
            getattr(self, operation)(row)
            del self.stored[: max(0, len(self.stored) - 8)]
            if self.chance.random() < self.checks:
                self.check()
        self.check()

    def check(self) -> None:
        for live in self.rows:
            self.kind.check(live.cache, live.stream)
        for snapshot, stream in self.stored:
            self.kind.check_snapshot(snapshot, stream)

    def append(self, row: Live) -> None:
        length = self.chance.choice(LENGTHS)
        tokens = []
        for _ in range(length):
            self.token += 1
            tokens.append(self.token % 251)
        row.stream = self.kind.feed(row.cache, row.stream, tokens, check=self.chance.random() < self.checks)
        self.cross(row)
        if self.kind.window:
            per_position = self.kind.heads * (self.kind.key_dim + self.kind.value_dim) * 4
            assert row.cache.nbytes <= (self.kind.window + max(LENGTHS) + 2 * linear.STEP) * per_position

    def cross(self, row: Live) -> None:
        while (
            not row.abandoned
            and len(row.reached) < len(row.planned)
            and row.planned[len(row.reached)] <= len(row.stream)
        ):
            offset = row.planned[len(row.reached)]
            row.reached.append((row.cursor, row.stream[:offset]))
            row.cursor = offset

    def plan(self, row: Live) -> None:
        if row.planned:
            return
        here = len(row.stream)
        row.planned = sorted({here + self.draw(0, 40) for _ in range(self.draw(1, 4))})
        row.cursor = here
        row.cache.plan(row.planned)
        self.cross(row)

    def take(self, row: Live) -> None:
        captures = row.cache.take()
        assert len(captures) == len(row.planned)
        for i, capture in enumerate(captures):
            if i >= len(row.reached):
                assert capture is None
                continue
            start, stream = row.reached[i]
            if capture is None:
                assert start == len(stream)
                continue
            if self.kind.sliceable:
                assert capture.start == start
            self.stored.append((capture, stream))
        row.planned, row.reached, row.abandoned = [], [], False

    def snapshot(self, row: Live) -> None:
        start = self.draw(0, len(row.stream))
        found = row.cache.snapshot(start)
        if found is None:  # a window of 1 that went back needs nothing but the token to come
            assert start == len(row.stream) or self.kind.window == 1
        else:
            if self.kind.sliceable:
                assert found.start == start
            self.stored.append((found, list(row.stream)))

    def pick(self) -> tuple[object, list[int]] | None:
        return self.stored[self.draw(0, len(self.stored) - 1)] if self.stored else None

    def own(self, row: Live) -> None:
        if chosen := self.pick():
            chosen[0].own()
            assert not chosen[0].lazy

    def drop(self, row: Live) -> None:
        if self.stored:
            self.stored.pop(self.draw(0, len(self.stored) - 1))

    def rewind(self, row: Live) -> None:
        target = self.draw(0, len(row.stream) + 1)
        help_ = None
        ends = [s for s, stream in self.stored if stream == row.stream[: len(stream)] and len(stream) == target]
        if ends and self.draw(0, 1):
            help_ = ends[0]
        before = len(row.stream)
        done = row.cache.rewind(target, help_)
        if target > before:
            assert not done
        if target in (0, before) or (target <= before and (self.kind.sliceable or help_ is not None)):
            assert done
        if done:
            row.stream = row.stream[:target]
            row.abandoned |= target != before and bool(row.planned)

    def restore(self, row: Live) -> None:
        chosen = self.pick()
        if chosen is None:
            return
        snapshot, stream = chosen
        if self.kind.sliceable and row.stream[: snapshot.start] != stream[: snapshot.start]:
            return
        target = self.chance.choice((None, len(stream), len(stream) + 1, self.draw(0, len(stream))))
        done = row.cache.restore(snapshot, target)
        if target in (None, len(stream)):
            assert done
        elif target > len(stream):
            assert not done
        if done:
            row.stream = stream[:target]
            row.abandoned |= bool(row.planned)

    def split(self, row: Live) -> None:
        chosen = self.pick()
        if chosen is None:
            return
        snapshot, stream = chosen
        at = self.draw(snapshot.start, snapshot.end)
        head, tail = row.cache.split(snapshot, at)
        if not self.kind.sliceable:
            assert (head, tail) == (None, snapshot)
            return
        if snapshot.start < at < snapshot.end:
            assert (head.start, head.end, tail.start, tail.end) == (snapshot.start, at, at, snapshot.end)
        self.stored += [(part, stream[: part.end]) for part in (head, tail) if part is not None]

    def merge(self, row: Live) -> None:
        pairs = [
            (parent, child, stream)
            for parent, prefix in self.stored
            for child, stream in self.stored
            if parent.end == child.start and stream[: parent.end] == prefix
        ]
        if not pairs or not self.kind.sliceable:
            if chosen := self.pick():
                kept = None if self.kind.sliceable else chosen[0]
                assert row.cache.merge(None, chosen[0]) is kept
            return
        parent, child, stream = pairs[self.draw(0, len(pairs) - 1)]
        merged = row.cache.merge(parent, child)
        assert (merged.start, merged.end) == (parent.start, child.end)
        self.stored.append((merged, stream))

    def free(self, row: Live) -> None:
        row.cache.free()
        assert row.cache.nbytes == 0
        assert row.cache.state() == []
        row.stream, row.planned, row.reached, row.abandoned = [], [], [], False


@pytest.mark.parametrize("writing", APPENDS)
@pytest.mark.parametrize("name", KINDS)
def test_any_history_equals_a_fresh_cache_fed_the_same_stream(name, writing):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "append", APPENDS[writing])
        patch.setattr(linear, "STEP", 8)

        # A seed and not single choices: the rare orders that matter need long, evenly spread histories.
        @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.integers(0, 2**32))
        def histories(seed):
            History(KINDS[name], random.Random(seed)).run()

        histories()
