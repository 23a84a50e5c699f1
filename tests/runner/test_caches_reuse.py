"""Stored snapshots stay what they were, cost what they say, and serve later requests."""

from __future__ import annotations

import gc
import hashlib
import weakref

import mlx.core as mx
import numpy as np
import pytest

from arriero.kernels.append import graph
from arriero.runner.caches import KVCache, RangeSnapshot, RecurrentCache, SlidingCache, linear
from tests.helpers.cache_streams import KINDS, Attention, in_place
from tests.helpers.numbered import column, numbered, positions


def digest(snapshot: RangeSnapshot) -> str:
    return hashlib.sha256(b"".join(np.array(array).tobytes() for array in snapshot.arrays())).hexdigest()


@pytest.fixture(params=[linear.append, graph, in_place], ids=["of the device", "plain", "in place"])
def any_write(request, monkeypatch):
    """Every way of writing: what this device does, a new version of the buffer, and the buffer's own memory."""
    monkeypatch.setattr(linear, "append", request.param)


def test_refilling_after_a_rewind_copies_out_every_snapshot_it_reaches_on_every_append(any_write):
    cache = KVCache(1, 2, 2, mx.float32)
    cache.plan([10, 20, 30, 40])
    cache.append(*numbered(0, 50))
    parts = cache.take()
    assert [part.nbytes for part in parts] == [0, 0, 0, 0]
    assert cache.rewind(10)
    for position in range(10, 35):
        cache.append(*numbered(position, 1, first=1000.0))
        owned = [part.nbytes > 0 for part in parts]
        assert owned == [False, position >= 10, position >= 20, position >= 30]
    cache.free()
    for part in parts:
        assert cache.restore(part)
    assert column(cache.view()[0]) == positions(0, 40)


@pytest.mark.parametrize("kind", [Attention(), Attention(window=16)], ids=["full", "sliding"])
def test_an_owned_snapshot_does_not_pin_the_buffer_it_came_from(kind):
    cache = KVCache(1, 256, 256, mx.float32) if kind.window is None else SlidingCache(1, 256, 256, mx.float32, 16)
    mx.synchronize()
    before = mx.get_active_memory()
    keys = mx.ones((1, 1, 2000, 256))
    cache.plan([7, 8])
    cache.append(keys, keys)
    del keys
    mx.eval(cache.state())
    _, snapshot = cache.take()
    cache.free()
    mx.synchronize()
    gc.collect()
    assert snapshot.nbytes == (1 if kind.window is None else 8) * 2 * 256 * 4
    assert mx.get_active_memory() - before < 100_000


def test_snapshots_never_share_memory_with_the_live_buffer():
    # One head and a buffer that is hardly larger than the slice: `mx.contiguous` returns the buffer's own memory here.
    cache = KVCache(1, 2, 2, mx.float32)
    cache.append(*numbered(0, 256))
    snapshot = cache.snapshot()
    snapshot.own()
    buffer, copy = (np.array(array, copy=False) for array in (cache.state()[0], snapshot.arrays()[0]))
    assert not np.shares_memory(buffer, copy)


def test_a_convolution_tail_does_not_pin_the_prompt_it_was_cut_from():
    cache = RecurrentCache(3, 512, mx.float32, (2, 2))
    mx.synchronize()
    before = mx.get_active_memory()
    inputs = mx.ones((1, 4000, 512))
    cache.put([(inputs[:, -3:], mx.zeros((1, 2, 2)))], 4000)
    del inputs
    mx.eval(cache.state())
    assert cache.nbytes == 3 * 512 * 4 + 16
    assert mx.get_active_memory() - before < 100_000


def test_rejecting_drafts_on_keys_and_values_copies_and_allocates_nothing(monkeypatch):
    cache = KVCache(1, 2, 2, mx.float32)
    cache.append(*numbered(0, 100))
    held = cache.nbytes

    def copied(snapshots):
        raise AssertionError(f"copied {snapshots}")

    monkeypatch.setattr(cache, "copy_out", copied)
    for _ in range(20):
        before = cache.offset
        cache.plan(range(before + 1, before + 5))
        cache.append(*numbered(before, 5))
        captures = cache.take()
        kept = captures[1]
        del captures
        assert cache.rewind(before + 2, kept)
        del kept
    assert cache.nbytes == held


@pytest.mark.parametrize("kind", [Attention(), Attention(window=16)], ids=["full", "sliding"])
def test_captures_that_were_dropped_are_not_copied_out_by_the_next_write(kind, monkeypatch):
    cache = kind.new()
    stream = kind.feed(cache, [], list(range(60)))
    cache.plan([61, 62, 63])
    kind.feed(cache, stream, [1, 2, 3])
    copied = []
    monkeypatch.setattr(cache, "copy_out", copied.append)
    captures = cache.take()
    dropped = weakref.ref(captures[2])
    del captures
    assert dropped() is None
    assert cache.rewind(61)
    kind.feed(cache, [*stream, 1], [9, 9])
    assert copied == []


def test_what_was_restored_from_another_cache_stays_when_that_one_goes_back_and_writes_in_place():
    for kind in (Attention(), Attention(window=16)):
        owner, reader = kind.new(), kind.new()
        stream = kind.feed(owner, [], list(range(30)))
        snapshot = owner.snapshot()
        assert reader.restore(snapshot)
        assert owner.rewind(20)
        kind.feed(owner, stream[:20], [7] * 10)
        kind.check(reader, stream)


def test_the_hook_hears_once_how_many_bytes_a_lazy_snapshot_came_to_own():
    cache = KVCache(2, 4, 0, mx.bfloat16)
    cache.append(mx.ones((1, 2, 20, 4), mx.bfloat16), mx.ones((1, 2, 20, 0), mx.bfloat16))
    heard = []
    snapshot = cache.snapshot(5)
    snapshot.on_own = heard.append
    assert heard == []
    cache.free()
    snapshot.own()
    assert heard == [15 * 2 * 4 * 2] == [snapshot.nbytes]


def test_two_adjacent_lazy_ranges_merge_and_split_without_a_copy():
    cache = KVCache(1, 2, 2, mx.float32)
    cache.plan([10, 20])
    cache.append(*numbered(0, 20))
    first, second = cache.take()
    merged = cache.merge(first, second)
    assert (merged.start, merged.end, merged.lazy) == (0, 20, True)
    head, tail = cache.split(merged, 4)
    assert (head.lazy, tail.lazy) == (True, True)
    assert column(tail.arrays()[0]) == positions(4, 20)


def test_ranges_that_do_not_meet_are_not_merged():
    cache = KVCache(1, 2, 2, mx.float32)
    cache.plan([10, 20, 30])
    cache.append(*numbered(0, 30))
    first, _, third = cache.take()
    with pytest.raises(ValueError, match="do not meet"):
        cache.merge(first, third)
    assert cache.merge(first, None) is None


def test_snapshots_of_another_kind_or_geometry_are_refused():
    full, state = KVCache(1, 2, 2, mx.float32), RecurrentCache(3, 2, mx.float32, (2, 2))
    full.append(*numbered(0, 4))
    state.put([(mx.zeros((1, 3, 2)), mx.zeros((1, 2, 2)))], 4)
    with pytest.raises(TypeError, match="keys and values"):
        full.restore(state.snapshot())
    with pytest.raises(TypeError, match="whole state"):
        state.restore(full.snapshot())
    wider = KVCache(2, 2, 2, mx.float32)
    assert not wider.restore(full.snapshot())
    assert wider.offset == 0


def test_writing_a_new_tail_after_a_shared_prefix_changes_no_stored_entry(any_write):
    cache = KVCache(1, 2, 2, mx.float32)
    cache.append(*numbered(0, 500))
    stored = cache.snapshot()
    other = KVCache(1, 2, 2, mx.float32)
    assert other.restore(stored, 300)
    before = digest(stored)
    for position in range(300, 400):
        other.append(*numbered(position, 1, first=5000.0))
        assert digest(stored) == before
    assert cache.rewind(300)
    for position in range(300, 400):
        cache.append(*numbered(position, 1, first=7000.0))
    assert digest(stored) == before
    assert column(other.view()[0]) == positions(0, 300) + positions(5300, 5400)
    assert cache.restore(stored)
    assert column(cache.view()[0]) == positions(0, 500)
    assert digest(stored) == before


@pytest.mark.parametrize("prefix", [15, 16, 17, 40])
@pytest.mark.parametrize("tail", [3, 16, 17, 300])
def test_sequential_requests_over_one_prefix_each_see_their_own_window(prefix, tail, any_write):
    cache = SlidingCache(1, 2, 2, mx.float32, window=16)
    cache.plan([prefix - 4, prefix])
    cache.append(*numbered(0, prefix))
    inside, stored = cache.take()
    for request in range(1, 4):
        source, start = (inside, prefix - 4) if request == 3 else (stored, prefix)
        if not cache.rewind(start):
            assert cache.restore(source)
        assert cache.offset == start
        for position in range(start, start + tail):
            keys, _, base = cache.append(*numbered(position, 1, first=1000.0 * request))
            first = max(0, position - 15)
            own = positions(max(first, start), position + 1)
            wanted = positions(first, max(first, start)) + [p + 1000.0 * request for p in own]
            assert column(keys)[first - base :] == wanted


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_joins_with_history_is_captured_leaves_and_is_cut_back(name, any_write):
    kind = KINDS[name]
    first, second = kind.new(), kind.new()
    shared = kind.feed(first, [], list(range(40)))
    history = first.snapshot()
    assert second.restore(history)
    one, two = shared, shared
    second.plan([45])
    for step in range(10):
        one = kind.feed(first, one, [100 + step])
        two = kind.feed(second, two, [200 + step])
    (boundary,) = second.take()
    kind.check_snapshot(boundary, two[:45])
    second.free()
    kind.check_snapshot(boundary, two[:45])
    for step in range(30):
        one = kind.feed(first, one, [60 + step])
    kind.check(first, one)
    if kind.sliceable:
        assert second.restore(history)
    assert second.restore(boundary)
    kind.check(second, two[:45])
    assert second.rewind(45)
    assert second.rewind(40, history)
    kind.check(second, shared)
    kind.check_snapshot(history, shared)


@pytest.mark.parametrize("name", ["sliding", "recurrent"])
def test_memory_stays_flat_over_thousands_of_steps(name):
    kind = KINDS[name]
    cache = kind.new()
    marks = []
    for step in range(3000):
        if kind.window:
            column = mx.full((1, kind.heads, 1, kind.key_dim), float(step))
            cache.append(column, column[..., : kind.value_dim])
        else:
            conv, state = cache.get()
            cache.put([(conv + 1, state * 0.5)], 1)
        mx.eval(cache.state())
        if step % 500 == 499:
            marks.append((cache.nbytes, mx.get_active_memory()))
    assert len({nbytes for nbytes, _ in marks[1:]}) == 1
    assert max(active for _, active in marks[1:]) - min(active for _, active in marks[1:]) < 20_000
