"""The rules that caches of other engines broke, one named test each."""

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


def numbered(start: int, count: int, first: float = 0.0) -> tuple[mx.array, mx.array]:
    """Keys and values `[1, 1, count, 2]` that tell their position and the conversation `first`."""
    column = mx.arange(start, start + count, dtype=mx.float32)[None, None, :, None] + first
    return mx.broadcast_to(column, (1, 1, count, 2)), mx.broadcast_to(-column, (1, 1, count, 2))


def column(keys: mx.array) -> list[float]:
    return np.array(keys)[0, 0, :, 0].tolist()


def digest(snapshot: RangeSnapshot) -> str:
    return hashlib.sha256(b"".join(np.array(array).tobytes() for array in snapshot.arrays())).hexdigest()


def positions(start: int, end: int) -> list[float]:
    return [float(p) for p in range(start, end)]


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


def test_a_multi_token_write_past_the_window_keeps_the_last_positions_before_it():
    cache = SlidingCache(1, 2, 2, mx.float32, window=16)
    for position in range(700):
        cache.append(*numbered(position, 1))
    keys, _, base = cache.append(*numbered(700, 5))
    assert base <= 700 - 15
    assert column(keys) == positions(base, 705)


def test_a_multi_token_write_sees_neither_growth_padding_nor_what_was_rewound():
    cache = SlidingCache(1, 2, 2, mx.float32, window=64)
    cache.append(*numbered(0, 1))
    cache.append(*numbered(1, 30, first=1000.0))
    assert cache.rewind(1)
    keys, _, base = cache.append(*numbered(1, 3))
    assert (base, column(keys)) == (0, positions(0, 4))


@pytest.mark.parametrize("window", [1, 2, 16, 255, 256, 257])
def test_attention_over_a_sliding_cache_equals_a_full_cache_with_a_window_mask(window):
    rng = np.random.default_rng(window)
    sliding, full = SlidingCache(2, 4, 4, mx.float32, window), KVCache(2, 4, 4, mx.float32)

    def attend(queries: np.ndarray, keys: mx.array, values: mx.array, base: int, start: int) -> np.ndarray:
        k, v = np.array(keys, np.float64), np.array(values, np.float64)
        scores = queries @ k.swapaxes(-1, -2)
        at = np.arange(base, base + k.shape[2])[None, :]
        by = np.arange(start, start + queries.shape[2])[:, None]
        scores = np.where((at <= by) & (at > by - window), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return (weights / weights.sum(-1, keepdims=True)) @ v

    lengths = [3, 1, 1, 40, 1, 300, 1, 1, 1, 513, 2, 1, 256, 1, 1, 7]
    for step, length in enumerate(lengths):
        start = full.offset
        k, v = (mx.array(rng.standard_normal((1, 2, length, 4)).astype(np.float32)) for _ in range(2))
        queries = rng.standard_normal((1, 2, length, 4))
        got = attend(queries, *sliding.append(k, v), start)
        wanted = attend(queries, *full.append(k, v), start)
        assert np.allclose(got, wanted, rtol=1e-12, atol=1e-12)
        if step % 4 == 3:
            assert sliding.rewind(start + 1) == full.rewind(start + 1) is True


def test_a_sliding_cache_holds_no_more_than_window_chunk_and_two_steps():
    window, most = 300, 0
    cache = SlidingCache(1, 2, 2, mx.float32, window)
    for length in [1, 700, 1, 256, 255, 257, 2048, 3] + [1] * 900 + [512, 1, 1]:
        most = max(most, length)
        cache.append(*numbered(cache.offset, length))
        assert cache.base % linear.STEP == 0
        assert cache.nbytes <= (window + most + 512) * 16
        assert cache.oldest <= max(0, cache.offset - window)


def test_a_sliding_cache_rewinds_to_every_offset_whose_window_is_held():
    cache = SlidingCache(1, 2, 2, mx.float32, window=16)
    for position in range(1000):
        cache.append(*numbered(position, 1))
    lowest = cache.oldest + 15
    assert cache.oldest > 0
    assert not cache.rewind(lowest - 1)
    assert cache.offset == 1000
    assert cache.rewind(lowest)
    keys, _, base = cache.append(*numbered(lowest, 1))
    assert column(keys) == positions(base, lowest + 1)


def test_a_rewind_into_the_last_write_never_needs_a_snapshot():
    for window in (1, 16, 255, 256, 257):
        cache = SlidingCache(1, 2, 2, mx.float32, window)
        for _ in range(150):
            before = cache.offset
            cache.append(*numbered(before, 9))
            assert cache.rewind(before + 1)


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


def test_a_snapshot_of_a_state_for_every_token_is_compact_once_owned():
    cache = RecurrentCache(1, 1, mx.float32, (256, 256))
    cache.get()
    cache.plan(list(range(1, 8)))
    mx.synchronize()
    before = mx.get_active_memory()
    states = mx.ones((8, 256, 256))
    cache.put([(mx.zeros((1, 1, 1)), states[i][None]) for i in range(8)], 8)
    del states
    capture = cache.take()[3]
    assert capture.nbytes == 256 * 256 * 4 + 4
    capture.own()
    cache.free()
    mx.eval(capture.arrays)
    assert mx.get_active_memory() - before < 300_000


def test_a_recurrent_state_is_float32_beside_a_bfloat16_tail_also_in_snapshots():
    cache = RecurrentCache(3, 4, mx.bfloat16, (2, 2))
    conv, state = cache.get()
    assert (conv.dtype, state.dtype) == (mx.bfloat16, mx.float32)
    with pytest.raises(ValueError, match="recurrent state"):
        cache.put([(conv, state.astype(mx.bfloat16))], 1)
    cache.put([(conv, state + 1)], 1)
    snapshot = cache.snapshot()
    cache.free()
    assert cache.restore(snapshot)
    assert [array.dtype for array in cache.get()] == [mx.bfloat16, mx.float32]


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


def test_states_after_every_token_of_one_write_equal_stepwise_execution():
    kind = KINDS["recurrent"]
    cache = kind.new()
    stream = kind.feed(cache, [], [5, 6, 7])
    cache.plan([4, 5, 6, 7])
    drafts = [8, 9, 10, 11]
    assert cache.splits(4) == [1, 2, 3]
    kind.feed(cache, stream, drafts)
    for count, capture in enumerate(cache.take(), 1):
        kind.check_snapshot(capture, stream + drafts[:count])


@pytest.mark.parametrize("name", KINDS)
def test_a_refused_restore_leaves_the_cache_as_it_was(name):
    kind = KINDS[name]
    other = kind.new()
    other_stream = kind.feed(other, [], list(range(100, 150)))
    later = other.snapshot(40)
    cache = kind.new()
    stream = kind.feed(cache, [], list(range(30)))
    cache.plan([31])
    assert not cache.restore(later, 51)
    assert not cache.restore(later, -1)
    if kind.sliceable:
        assert not cache.restore(later), "positions 30 to 40 would be missing"
    assert not cache.rewind(31)
    assert not cache.rewind(-1)
    kind.check(cache, stream)
    stream = kind.feed(cache, stream, [1])
    assert cache.take()[0] is not None
    kind.check(cache, stream)
    kind.check(other, other_stream)


def test_a_window_is_refused_at_an_offset_where_it_would_be_incomplete():
    cache = SlidingCache(1, 2, 2, mx.float32, window=16)
    cache.append(*numbered(0, 600))
    snapshot = cache.snapshot()
    cache.free()
    assert not cache.restore(snapshot, 598)
    assert cache.restore(snapshot, 599)
    keys, _, base = cache.append(*numbered(599, 1))
    assert column(keys)[584 - base :] == positions(584, 600)


def test_a_restored_window_is_not_rewound_into_positions_that_it_does_not_hold():
    cache = SlidingCache(1, 2, 2, mx.float32, window=16)
    cache.append(*numbered(0, 600))
    snapshot = cache.snapshot()
    assert SlidingCache(1, 2, 2, mx.float32, window=16).restore(snapshot)
    cache.free()
    assert cache.restore(snapshot)
    assert cache.base < snapshot.start == cache.oldest == 584
    assert not cache.rewind(598)
    assert cache.rewind(599)


def test_a_lazy_snapshot_of_another_cache_is_copied_out_before_it_is_read():
    # A copy that reads the other buffer lazily could see what that cache writes in place later.
    for kind in (Attention(), Attention(window=16)):
        owner, reader = kind.new(), kind.new()
        stream = kind.feed(owner, [], list(range(30)))
        snapshot = owner.snapshot()
        assert reader.restore(snapshot)
        assert not snapshot.lazy
        kind.check(reader, stream)


@pytest.mark.parametrize("name", KINDS)
def test_a_bad_plan_fails_loudly(name):
    kind = KINDS[name]
    cache = kind.new()
    kind.feed(cache, [], [1, 2, 3])
    with pytest.raises(ValueError, match="already holds 3"):
        cache.plan([2])
    for unordered in ([5, 4], [4, 4]):
        with pytest.raises(ValueError, match="ascend"):
            cache.plan(unordered)
    cache.plan([4])
    with pytest.raises(ValueError, match="not taken"):
        cache.plan([5])
    assert cache.take() == [None]
    cache.plan([])
    assert cache.take() == []


@pytest.mark.parametrize("name", KINDS)
def test_a_capture_at_the_current_offset_is_the_state_there_or_nothing(name):
    kind = KINDS[name]
    cache = kind.new()
    stream = kind.feed(cache, [], list(range(20)))
    cache.plan([20, 21])
    kind.feed(cache, stream, [1])
    here, there = cache.take()
    kind.check_snapshot(there, [*stream, 1])
    if kind.sliceable:
        assert here is None
    else:
        kind.check_snapshot(here, stream)


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


@pytest.mark.parametrize(
    ("keys", "values"),
    [((1, 1, 3, 2), (1, 1, 2, 2)), ((1, 2, 3, 2), (1, 2, 3, 2)), ((1, 1, 0, 2), (1, 1, 0, 2)), ((3, 2), (3, 2))],
)
def test_an_append_of_another_shape_is_refused(keys, values):
    with pytest.raises(ValueError, match="cache of 1 heads"):
        KVCache(1, 2, 2, mx.float32).append(mx.zeros(keys), mx.zeros(values))


def test_an_append_of_another_dtype_is_refused_before_it_can_hide_a_promotion():
    with pytest.raises(ValueError, match="bfloat16"):
        KVCache(1, 2, 2, mx.bfloat16).append(mx.zeros((1, 1, 1, 2)), mx.zeros((1, 1, 1, 2)))


def test_a_wrong_number_of_states_is_refused():
    cache = RecurrentCache(3, 2, mx.float32, (2, 2))
    state = cache.get()
    cache.plan([2])
    with pytest.raises(ValueError, match="2 are expected"):
        cache.put([state], 4)


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
