"""Any history of rows that begin, go on, share, end, fail and are forgotten gives every row its own prompt back."""

from __future__ import annotations

import random
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import arriero.runner.caches.linear as linear
import arriero.runner.prefix.store as store_module
from arriero.runner.prefix.disk import DiskTier
from arriero.runner.prefix.keys import row_keys
from arriero.runner.prefix.store import PrefixStore
from tests.helpers.cache_streams import KINDS, in_place

MIXES = {
    "full": ["full", "full without values"],
    "full and sliding": ["full", "sliding", "sliding window of 1"],
    "full and recurrent": ["recurrent", "full", "n-gram"],
    "every kind": list(KINDS),
    "states only": ["recurrent", "n-gram"],
    "windows only": ["sliding window not of a step"],
}
PLENTY = 1 << 30


class Row:
    """One running row of the model that the drivers make up."""

    def __init__(self, world: World, prompt: list[int], boundaries: list[int]) -> None:
        self.world, self.prompt = world, prompt
        self.reuse = world.store.begin(row_keys(prompt), boundaries)
        self.stream = prompt[: self.reuse.offset]
        self.check()

    def check(self) -> None:
        for cache, kind in zip(self.reuse.caches, self.world.slots(), strict=True):
            if kind is None:
                assert cache is None
            elif self.stream:
                kind.check(cache, self.stream)
            else:
                assert cache.offset == 0

    def feed(self, tokens: list[int]) -> None:
        before = self.stream
        for cache, kind in zip(self.reuse.caches, self.world.slots(), strict=True):
            if kind is not None:
                self.stream = kind.feed(cache, before, tokens)

    @property
    def left(self) -> list[int]:
        """The prompt that is still to be fed, without its last token."""
        return self.prompt[len(self.stream) : -1]


class World:
    """A store with rows on it, and everything that a row ever left there."""

    def __init__(self, mix: str, budget: int, folder: Path | None = None) -> None:
        self.kinds = [KINDS[name] for name in MIXES[mix]]
        self.budget, self.folder = budget, folder
        self.disk: DiskTier | None = None
        self.open()
        self.rows: list[Row] = []
        self.left: list[list[int]] = [[]]
        self.evicted = False

    def open(self) -> None:
        self.disk = None if self.folder is None else DiskTier(self.folder, PLENTY)
        self.store = PrefixStore(SimpleNamespace(new_caches=self.new_caches), self.budget, self.disk)

    def restart(self, rng: random.Random) -> None:
        """Another process over the same files."""
        if not self.rows and self.disk is not None:
            self.disk.close()
            self.open()

    def slots(self) -> list:
        return [*self.kinds, None]

    def new_caches(self) -> list:
        return [*(kind.new() for kind in self.kinds), None]

    def begin(self, rng: random.Random) -> None:
        known = rng.choice(self.left)
        prompt = known[: rng.randrange(len(known) + 1)] if rng.random() < 0.7 else list(known)
        prompt = [*prompt, *(rng.randrange(3) for _ in range(rng.randrange(1, 25)))]
        ends = sorted(rng.sample(range(len(prompt) + 1), min(len(prompt), 4)))
        row = Row(self, prompt, ends)
        assert row.reuse.offset <= min(row.reuse.matched, len(prompt) - 1)
        if not self.evicted and not self.rows:
            whole = [s for s in self.left if len(s) < len(prompt) and prompt[: len(s)] == s]
            assert row.reuse.offset >= max(len(s) for s in whole)
            sliceable = all(kind.sliceable for kind in self.kinds)
            if self.disk is None or sliceable:
                assert row.reuse.matched == max(shared(s, prompt) for s in self.left)
            if sliceable:
                assert row.reuse.offset == min(row.reuse.matched, len(prompt) - 1)
        self.rows.append(row)

    def extend(self, rng: random.Random) -> None:
        row = rng.choice(self.rows)
        left = row.left
        if left:
            row.feed(left[: rng.randrange(1, len(left) + 1)])
        else:
            following = row.prompt[len(row.stream) :] or [rng.randrange(3)]
            row.feed(following[:1])

    def share(self, rng: random.Random) -> None:
        row = rng.choice(self.rows)
        if len(row.stream) <= len(row.prompt):
            offset = rng.choice([None, rng.randrange(len(row.prompt))])
            self.store.share(row.reuse, row_keys(row.prompt), offset)

    def close(self, rng: random.Random) -> None:
        row = self.rows.pop(rng.randrange(len(self.rows)))
        row.check()
        self.store.close(row.reuse, row_keys([*row.stream, 1, 2]))
        self.left.append(row.stream)
        if not self.rows:
            assert self.store.nbytes <= self.store.trie.budget
            self.evicted = self.evicted or self.store.trie.budget < PLENTY

    def abandon(self, rng: random.Random) -> None:
        row = self.rows.pop(rng.randrange(len(self.rows)))
        self.store.abandon(row.reuse)
        self.evicted = True

    def shrink(self, rng: random.Random) -> None:
        budget = rng.randrange(max(self.store.nbytes, 1))
        self.store.shrink(budget)
        self.evicted = True
        if not self.rows:
            assert self.store.nbytes <= budget

    def check(self) -> None:
        for row in self.rows:
            row.check()
        trie = self.store.trie
        owned = sum(s.nbytes for node in trie.nodes() for s in node.snapshots if s is not None)
        resting = sum(rest.nbytes for node in trie.nodes() for rest in node.rests)
        assert self.store.nbytes == owned + resting
        assert len(trie) == len(list(trie.nodes()))
        for node in trie.nodes():
            assert all(rest.leaf is node for rest in node.rests)
            stream = [int(key) for above in node.path for key in above.keys]
            assert node.end == len(stream)
            assert node.children == {int(child.keys[0]): child for child in node.children.values()}
            for kind, snapshot in zip(self.kinds, node.snapshots, strict=False):
                if snapshot is not None:
                    kind.check_snapshot(snapshot, stream)
                if kind.sliceable:
                    assert snapshot is not None
                    assert (snapshot.start, snapshot.end) == (node.start, node.end)


def shared(first: list[int], second: list[int]) -> int:
    count = 0
    while count < min(len(first), len(second)) and first[count] == second[count]:
        count += 1
    return count


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "STEP", 8)
    monkeypatch.setattr(linear, "append", in_place)
    monkeypatch.setattr(store_module, "RESTORE_EVERY", 16)
    monkeypatch.setattr(store_module, "WORTH_READING", 1)


def test_a_window_that_is_copied_for_a_row_counts_at_once() -> None:
    """A history found by chance: the row that began with the copy ended before it had stored anything."""
    live(World("full and sliding", 3_000), random.Random(22421), 6)


def test_a_window_of_one_position_is_never_stored_empty(tmp_path: Path) -> None:
    """A history found by chance: a row that went back within such a window ended there, and left nothing of it."""
    world = World("full and sliding", PLENTY, tmp_path / "model")
    live(world, random.Random(1399), 23)
    assert world.disk is not None
    world.disk.close()


@pytest.mark.parametrize("mix", MIXES)
@settings(max_examples=350, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), steps=st.integers(5, 40), budget=st.sampled_from([PLENTY, PLENTY, 20_000, 3_000]))
def test_every_row_gets_its_own_prompt_back(mix: str, seed: int, steps: int, budget: int) -> None:
    rng = random.Random(seed)
    world = World(mix, budget)
    live(world, rng, steps)


@pytest.mark.parametrize("mix", MIXES)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), steps=st.integers(5, 40), budget=st.sampled_from([PLENTY, 3_000]))
def test_restarts_find_on_disk_what_was_stored(mix: str, seed: int, steps: int, budget: int) -> None:
    rng = random.Random(seed)
    with TemporaryDirectory() as folder:
        world = World(mix, budget, Path(folder, "model"))
        live(world, rng, steps)
        world.disk.close()


def live(world: World, rng: random.Random, steps: int) -> None:
    for _ in range(steps):
        choices = [world.begin] if len(world.rows) < 3 else [world.extend]
        if world.rows:
            choices += [world.extend] * 3 + [world.close] * 2 + [world.share]
        rare = rng.random()
        if rare < 0.03 and world.rows:
            world.abandon(rng)
        elif rare < 0.08:
            world.shrink(rng)
        elif rare < 0.2 and world.disk is not None:
            world.restart(rng)
        else:
            rng.choice(choices)(rng)
        world.check()
