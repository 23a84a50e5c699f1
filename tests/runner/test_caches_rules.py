"""What a cache holds, refuses and captures: rules that caches of other engines broke, one named test each."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from arriero.runner.caches import KVCache, RecurrentCache, SlidingCache, linear
from tests.helpers.cache_streams import KINDS
from tests.helpers.numbered import column, numbered, positions


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


@pytest.mark.parametrize("window", [None, 1, 16, 256, 300])
def test_a_view_from_a_position_is_what_the_write_there_was_given(window):
    cache = KVCache(1, 2, 2, mx.float32) if window is None else SlidingCache(1, 2, 2, mx.float32, window)
    for length in [3, 1, 1, 40, 300, 1, 513, 2, 1, 256, 1, 7]:
        start = cache.offset
        keys, values, base = cache.append(*numbered(start, length))
        seen = cache.view(start)
        assert seen[2] == base
        assert column(seen[0]) == column(keys) == positions(base, start + length)
        assert column(seen[1]) == column(values)
        assert cache.offset == start + length


def test_a_sliding_cache_holds_no_more_than_window_chunk_and_two_steps():
    window, most = 300, 0
    cache = SlidingCache(1, 2, 2, mx.float32, window)
    for length in [1, 700, 1, 256, 255, 257, 2048, 3] + [1] * 900 + [512, 1, 1]:
        most = max(most, length)
        cache.append(*numbered(cache.offset, length))
        assert cache.base % linear.STEP == 0
        assert cache.nbytes <= (window + most + 512) * 16
        assert cache.oldest <= max(0, cache.offset - window)


@pytest.mark.parametrize("chunk", [300, 512, 700, 2048])
def test_behind_a_chunk_a_sliding_cache_goes_back_to_what_a_row_reserves(chunk):
    window, cache = 300, SlidingCache(1, 2, 2, mx.float32, 300)
    cache.append(*numbered(0, 40))
    cache.append(*numbered(40, chunk))
    for _ in range(600):
        keys, _, base = cache.append(*numbered(cache.offset, 1))
        assert column(keys) == positions(base, cache.offset)
        assert base <= max(0, cache.offset - window)
        assert cache.nbytes <= (window + 512) * 16


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


@pytest.mark.parametrize("name", KINDS)
def test_going_back_gives_up_on_captures_that_were_not_crossed_and_keeps_those_that_were(name):
    kind = KINDS[name]
    cache = kind.new()
    stream = kind.feed(cache, [], list(range(20)))
    stored = cache.snapshot()
    cache.plan([25])
    assert cache.restore(stored)
    kind.feed(cache, stream, list(range(10)))
    assert cache.take() == [None]
    cache.plan([35, 60])
    kind.feed(cache, [*stream, *range(10)], list(range(10)))
    assert cache.rewind(0)
    kind.feed(cache, [], list(range(70)))
    crossed, missed = cache.take()
    assert missed is None
    kind.check_snapshot(crossed, [*stream, *range(10), *range(5)])


@pytest.mark.parametrize("window", [None, 16])
def test_what_a_kernel_writes_into_the_buffers_themselves_is_read_after_it_was_written(window):
    cache = KVCache(1, 2, 2, mx.float32) if window is None else SlidingCache(1, 2, 2, mx.float32, window)
    cache.append(*numbered(0, 3))
    keys, values, base = cache.reserve_in_place(2)
    assert base == 0
    new = numbered(3, 2)
    mx.eval(keys, values, new)
    written = mx.zeros(1)
    cache.commit_in_place(2, written)
    for buffer, update in zip((keys, values), new, strict=True):
        np.asarray(buffer)[:, :, 3:5] = np.asarray(update)
    assert cache.offset == 5
    again, _, _ = cache.reserve_in_place(1)
    assert again is keys
    assert column(cache.range(0, 5)[0]) == positions(0, 5)
    # From here on the buffers are arrays of their own, which are computed after the write.
    assert cache.state()[0] is not keys
    assert cache.rewind(4)
    held, _, first = cache.append(*numbered(4, 2))
    assert column(held) == positions(first, 6)


def test_a_capture_is_taken_as_a_write_in_place_crosses_its_offset():
    cache = KVCache(1, 2, 2, mx.float32)
    cache.append(*numbered(0, 2))
    cache.plan([3])
    keys, values, _ = cache.reserve_in_place(1)
    mx.eval(keys, values)
    for buffer, update in zip((keys, values), numbered(2, 1), strict=True):
        np.asarray(buffer)[:, :, 2:3] = np.asarray(update)
    cache.commit_in_place(1, mx.zeros(1))
    (captured,) = cache.take()
    assert column(captured.arrays()[0]) == positions(2, 3)


def test_on_a_gpu_caches_of_all_positions_grow_seldom_and_before_they_are_full(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(linear.device, "cuda", object)
    cache = KVCache(1, 2, 2, mx.float32)
    sizes = []
    for at in range(0, 1800, 300):
        cache.append(*numbered(at, 300))
        sizes.append(cache.layout[1])
    assert sizes == [1024, 1024, 1024, 2048, 2048, 2048]
    assert [linear.grown(tokens) for tokens in (768, 769)] == [1024, 2048]


def test_a_write_behind_all_that_is_stored_looks_at_none_of_it(monkeypatch: pytest.MonkeyPatch):
    cache = KVCache(1, 2, 2, mx.float32)
    cache.append(*numbered(0, 4))
    stored = cache.snapshot()
    assert stored is not None
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_lazy_snapshots", lambda: pytest.fail("each step would pay for it"))
        cache.append(*numbered(4, 1))
    assert cache.rewind(2)
    cache.append(*numbered(90, 1))
    assert column(stored.arrays()[0]) == positions(0, 4)


@pytest.mark.parametrize("then", ["append", "reserve", "reserve_in_place"])
def test_behind_a_long_chunk_a_window_holds_no_more_than_its_row_has_reserved(then: str):
    window, step = 16, linear.STEP
    cache = SlidingCache(1, 2, 2, mx.float32, window)
    cache.append(*numbered(0, 20 * step + 3))
    if then == "append":
        cache.append(*numbered(cache.offset, 1))
    else:
        getattr(cache, then)(1)
    assert cache.layout[1] <= window + 2 * step + 1
    # From where it is moved on, the same holds of what was restored, and after it was emptied.
    stored = cache.snapshot()
    assert stored is not None
    for restored in (False, True):
        again = SlidingCache(1, 2, 2, mx.float32, window)
        if restored:
            assert again.restore(stored)
        again.append(*numbered(again.offset, 9 * step + 1))
        again.reserve_in_place(1)
        assert again.layout[1] <= window + 2 * step + 1
        again.free()
        again.append(*numbered(0, 9 * step + 1))
        again.reserve_in_place(1)
        assert again.layout[1] <= window + 2 * step + 1


def test_an_append_comes_behind_what_was_written_in_place(monkeypatch: pytest.MonkeyPatch):
    cache = KVCache(1, 2, 2, mx.float32)
    buffers = cache.reserve_in_place(3)[:2]
    cache.commit_in_place(3, mx.zeros(1))
    given: list[mx.array] = []
    real = linear.append

    def recorded(buffer: mx.array, update: mx.array, start: int) -> mx.array:
        given.append(buffer)
        return real(buffer, update, start)

    monkeypatch.setattr(linear, "append", recorded)
    cache.append(*numbered(3, 1))
    # Arrays of their own, which are computed after the write.
    assert not any(one is other for one in given for other in buffers)
    assert len(given) == 2
