"""The opaque memory of a network of mlx-lm: what it can capture, where it goes back to, and what it leaves alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from arriero.model.adapters.mlx_lm import new_layers
from arriero.runner.caches import StateSnapshot
from arriero.runner.caches.foreign import ForeignCache, ForeignSnapshot
from arriero.runner.prefix.record import make_record
from tests.helpers.foreign_checkpoint import CONFIGS, network

IDS = np.random.default_rng(5).integers(0, 96, 40).tolist()
KINDS = sorted(CONFIGS)
NETWORKS: dict[str, Any] = {}


class Row:
    """A network of mlx-lm and the memory of one row."""

    def __init__(self, kind: str) -> None:
        self.network = NETWORKS.setdefault(kind, network(kind))
        self.cache = ForeignCache(lambda: new_layers(self.network))

    def feed(self, tokens: list[int]) -> np.ndarray:
        """Logits of the next tokens, stopping where captures are planned."""
        edges, parts = [0, *self.cache.splits(len(tokens)), len(tokens)], []
        for first, last in pairwise(edges):
            parts.append(self.network(mx.array([tokens[first:last]]), cache=self.cache.layers)[0])
            self.cache.advance(last - first)
        mx.eval(self.cache.state())
        return np.array(mx.concatenate(parts))

    def steps(self, tokens: list[int]) -> np.ndarray:
        """Logits of tokens given one by one."""
        return np.concatenate([self.feed([token]) for token in tokens])


def fresh(kind: str, length: int) -> Row:
    row = Row(kind)
    row.feed(IDS[:length])
    return row


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_goes_on_from_a_snapshot_as_if_it_had_read_the_prompt(kind: str) -> None:
    row = fresh(kind, 20)
    stored = row.cache.snapshot()
    assert isinstance(stored, ForeignSnapshot)
    assert (stored.start, stored.end) == (0, 20)
    wanted = row.steps(IDS[20:])
    other = Row(kind)
    assert other.cache.restore(stored)
    assert other.cache.offset == 20
    np.testing.assert_array_equal(other.steps(IDS[20:]), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_later_does_not_change_a_snapshot_or_whoever_else_goes_on_from_it(kind: str) -> None:
    row = fresh(kind, 12)
    row.cache.plan([12])
    (stored,) = row.cache.take()
    assert stored is not None
    wanted = row.steps(IDS[12:])
    first, second = Row(kind), Row(kind)
    assert first.cache.restore(stored)
    first.steps(IDS[::-1])
    assert second.cache.restore(stored)
    np.testing.assert_array_equal(second.steps(IDS[12:]), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_captures_inside_a_forward_are_the_states_at_their_offsets(kind: str) -> None:
    row = Row(kind)
    row.cache.plan([3, 17, 30])
    row.feed(IDS[:25])
    row.feed(IDS[25:])
    for offset, stored in zip([3, 17, 30], row.cache.take(), strict=True):
        assert stored is not None
        assert stored.end == offset
        other = Row(kind)
        assert other.cache.restore(stored)
        np.testing.assert_allclose(
            other.steps(IDS[offset:]), fresh(kind, offset).steps(IDS[offset:]), rtol=0, atol=1e-4
        )


@pytest.mark.parametrize("kind", ["olmo2", "phi3"])
def test_whole_keys_and_values_go_back_to_every_offset_by_themselves(kind: str) -> None:
    for offset in range(1, 25):
        row = fresh(kind, 25)
        assert row.cache.rewind(offset)
        assert row.cache.offset == offset
        np.testing.assert_allclose(row.feed(IDS[offset:]), Row(kind).feed(IDS)[offset:], rtol=0, atol=1e-4)


def test_a_window_goes_back_by_itself_only_before_it_turns() -> None:
    row = fresh("olmo3", 6)
    assert row.cache.rewind(3)
    np.testing.assert_allclose(row.steps(IDS[3:]), Row("olmo3").feed(IDS)[3:], rtol=0, atol=1e-4)
    assert not row.cache.rewind(30)


def test_a_state_does_not_go_back_by_itself() -> None:
    assert not fresh("lfm2", 10).cache.rewind(9)


@pytest.mark.parametrize(("kind", "length"), [("lfm2", 20), ("olmo3", 20)])
def test_a_refused_rewind_changes_nothing(kind: str, length: int) -> None:
    row = fresh(kind, length)
    row.cache.plan([length + 5])
    assert not row.cache.rewind(length - 1)
    assert row.cache.offset == length
    np.testing.assert_array_equal(row.steps(IDS[length:]), fresh(kind, length).steps(IDS[length:]))
    assert [stored.end for stored in row.cache.take() if stored is not None] == [length + 5]


class Short:
    """A layer that holds fewer positions than its neighbours, as a chunked one does."""

    def __init__(self, held: int) -> None:
        self.state: Any = (held, mx.zeros(held))
        self.nbytes = 4 * held

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        held, array = self.state
        dropped = min(held, n)
        self.state = (held - dropped, array)
        return dropped


def test_when_one_layer_cannot_drop_as_much_none_does() -> None:
    cache = ForeignCache(lambda: [Short(20), Short(5)])
    cache.advance(20)
    assert cache.rewind(16)
    assert not cache.rewind(8)
    assert (cache.offset, [layer.state[0] for layer in cache.layers]) == (16, [16, 1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_rewind_with_a_snapshot_and_one_to_the_start_always_work(kind: str) -> None:
    row = fresh(kind, 15)
    stored = row.cache.snapshot()
    wanted = row.steps(IDS[15:])
    assert row.cache.rewind(15, stored)
    np.testing.assert_array_equal(row.steps(IDS[15:]), wanted)
    assert row.cache.rewind(0)
    assert row.cache.nbytes == 0
    np.testing.assert_array_equal(row.feed(IDS[:15]), Row(kind).feed(IDS[:15]))


def test_a_snapshot_is_cut_shorter_only_where_the_layers_can_drop() -> None:
    whole = Row("phi3")
    assert whole.cache.restore(fresh("phi3", 20).cache.snapshot(), 7)  # type: ignore[arg-type]
    np.testing.assert_allclose(whole.steps(IDS[7:]), Row("phi3").feed(IDS)[7:], rtol=0, atol=1e-4)
    state = fresh("lfm2", 4)
    assert not state.cache.restore(fresh("lfm2", 20).cache.snapshot(), 7)  # type: ignore[arg-type]
    assert state.cache.offset == 4
    np.testing.assert_array_equal(state.steps(IDS[4:]), fresh("lfm2", 4).steps(IDS[4:]))


def test_a_scalar_of_a_state_survives() -> None:
    cache = ForeignCache(lambda: [Short(3)])
    cache.layers[0].state = (3, mx.array(7.0))
    cache.advance(3)
    stored = cache.snapshot()
    assert stored is not None
    other = ForeignCache(lambda: [Short(0)])
    assert other.restore(stored)
    held, scalar = other.layers[0].state
    assert (held, scalar.shape, scalar.item()) == (3, (), 7.0)


def test_snapshots_of_other_kinds_and_other_networks_are_told_apart() -> None:
    cache = Row("phi3").cache
    with pytest.raises(TypeError, match="StateSnapshot is not a snapshot of a foreign memory"):
        cache.restore(StateSnapshot(3, [], True))
    one = ForeignCache(lambda: [Short(3)])
    one.advance(3)
    assert not cache.restore(one.snapshot())  # type: ignore[arg-type]


def test_owning_a_snapshot_changes_no_number_and_happens_once() -> None:
    row = fresh("olmo2", 10)
    row.cache.plan([10])
    (stored,) = row.cache.take()
    assert isinstance(stored, ForeignSnapshot)
    before = [np.array(array) for array in stored.arrays]
    stored.own()
    owned = stored.arrays
    stored.own()
    assert stored.arrays is owned
    assert not stored.lazy
    for array, copy in zip(before, owned, strict=True):
        np.testing.assert_array_equal(array, np.array(copy))


def test_a_snapshot_is_not_written_to_disk() -> None:
    stored = fresh("olmo2", 10).cache.snapshot()
    assert make_record(np.arange(10, dtype=np.uint64), 0, 10, [stored], "") is None


def test_a_whole_state_stays_with_its_end_and_freeing_forgets_it() -> None:
    row = fresh("olmo2", 10)
    stored = row.cache.snapshot()
    assert stored is not None
    assert stored.nbytes == row.cache.nbytes > 0
    assert row.cache.split(stored, 4) == (None, stored)
    assert row.cache.merge(None, stored) is stored
    assert row.cache.snapshot(start=10) is None
    row.cache.free()
    assert (row.cache.offset, row.cache.nbytes, row.cache.state()) == (0, 0, [])
