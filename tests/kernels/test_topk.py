"""`kernels.topk` gives the indices of a stable full descending sort, in its order."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arriero.kernels import topk

LENGTHS = (1, 31, 32, 33, 2047, 2048, 2049, 4096, 9000)
DTYPES = (mx.float32, mx.float16, mx.bfloat16)


def by_choice(scores: mx.array, k: int) -> mx.array:
    """The extension's where it is installed; takes scores, where the routes of plain MLX take keys."""
    return topk.top_k(scores, k)


ROUTES = (topk.by_blocks, topk.by_pieces, by_choice)


def stable_sort(scores: mx.array, k: int) -> np.ndarray:
    """Numpy's stable sort of negated scores puts NaN last; the oracle shares no code with the kernel."""
    values = np.array(scores.astype(mx.float32))
    with np.errstate(invalid="ignore"):
        return np.argsort(-values, axis=-1, kind="stable")[..., :k]


def indices(route, scores: mx.array, k: int) -> np.ndarray:
    if route is by_choice:
        return np.array(route(scores.reshape(-1, scores.shape[-1]), k))
    return np.array(route(topk.sort_keys(scores).reshape(-1, scores.shape[-1]), k))


def rows(length: int, dtype: mx.Dtype, seed: int) -> dict[str, mx.array]:
    rng = np.random.default_rng(seed)
    plain = rng.standard_normal((2, length)).astype(np.float32)
    ties = rng.integers(-2, 3, (2, length)).astype(np.float32)
    low = plain.copy()
    low[:, rng.random(length) < 0.9] = -np.inf
    broken = ties.copy()
    broken[:, rng.random(length) < 0.5] = np.nan
    broken[:, rng.random(length) < 0.3] = -np.inf
    broken[:, rng.random(length) < 0.1] = np.inf
    broken[0, rng.random(length) < 0.2] *= -1
    equal = np.full((2, length), 0.5, np.float32)
    zeros = np.where(rng.random((2, length)) < 0.5, np.float32(-0.0), np.float32(0.0))
    named = {"plain": plain, "ties": ties, "low": low, "broken": broken, "equal": equal, "zeros": zeros}
    return {name: mx.array(values).astype(dtype) for name, values in named.items()}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("length", LENGTHS)
def test_every_route_equals_the_stable_sort(route, length):
    for dtype in DTYPES:
        for name, scores in rows(length, dtype, length).items():
            for k in sorted({1, 2, 40, length // 3, length - 1, length}):
                if 1 <= k <= length and (k <= 40 or length <= 2049 or name == "broken"):
                    assert np.array_equal(indices(route, scores, k), stable_sort(scores, k)), (name, dtype, k)


@pytest.mark.parametrize("route", ROUTES)
def test_a_vocabulary_of_a_quarter_million_equals_the_stable_sort(route):
    for name, scores in rows(248320, mx.bfloat16, 7).items():
        assert np.array_equal(indices(route, scores[:1], 64), stable_sort(scores[:1], 64)), name


@pytest.mark.parametrize("route", ROUTES)
def test_winners_beyond_one_block_are_sorted_in_rounds(route):
    scores = rows(40000, mx.float32, 3)["ties"]
    assert 700 * -(-40000 // topk.BLOCK) > topk.BLOCK
    assert np.array_equal(indices(route, scores, 700), stable_sort(scores, 700))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(st.floats(width=32), st.sampled_from([0.0, -0.0, float("inf"), float("-inf"), float("nan"), -1.0])),
        min_size=1,
        max_size=300,
    ),
    st.data(),
)
def test_any_floats_equal_the_stable_sort(values, data):
    scores = mx.array(np.array([values], np.float32))
    k = data.draw(st.integers(1, len(values)))
    for route in ROUTES:
        assert np.array_equal(indices(route, scores, k), stable_sort(scores, k))


def test_nans_of_both_signs_and_any_payload_tie_by_index():
    bits = np.array([0xFFC00000, 0x7FC00001, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800000], np.uint32)
    scores = mx.array(bits.view(np.float32)[None])
    for route in ROUTES:
        assert indices(route, scores, 7).tolist() == [[6, 0, 1, 2, 3, 4, 5]]


def test_padding_is_never_chosen_when_the_row_is_all_nan():
    scores = mx.full((1, 2 * topk.BLOCK + 1), float("nan"))
    for route in ROUTES:
        assert indices(route, scores, 2000).tolist() == [list(range(2000))]
    assert topk.top_k(scores, scores.shape[-1]).tolist() == [list(range(scores.shape[-1]))]


@pytest.mark.parametrize("shape", [(), (3,), (2, 1, 3), (0,)])
def test_leading_shapes_are_kept(shape):
    scores = mx.random.normal((*shape, 500), key=mx.random.key(1))
    values, found = topk.top_k_values(scores, 5)
    assert found.shape == values.shape == (*shape, 5)
    assert found.dtype == mx.int32
    assert np.array_equal(np.array(found), stable_sort(scores, 5))
    assert np.array_equal(np.array(values), np.take_along_axis(np.array(scores), np.array(found), axis=-1))


def test_values_keep_the_dtype_of_the_scores():
    values, _ = topk.top_k_values(mx.zeros((1, 100), mx.bfloat16), 3)
    assert values.dtype == mx.bfloat16


@pytest.mark.parametrize("k", [0, -1, 11])
def test_a_k_outside_the_row_is_refused(k):
    with pytest.raises(ValueError, match="between 1 and the length"):
        topk.top_k(mx.zeros((1, 10)), k)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("length", [1, 33, 2049, 70000])
def test_argmax_is_the_first_of_the_top(length):
    for dtype in DTYPES:
        for name, scores in rows(length, dtype, length).items():
            for part in (scores, scores[:1]):
                found = topk.argmax(part)
                assert found.dtype == mx.uint32
                assert np.array_equal(np.array(found), stable_sort(part, 1)[..., 0]), (name, dtype)


@pytest.mark.usefixtures("kernels")
def test_argmax_puts_nan_behind_everything():
    low, nan = float("-inf"), float("nan")
    assert topk.argmax(mx.array([[nan, low, nan], [nan, nan, nan], [nan, 1.0, 2.0]])).tolist() == [1, 0, 2]
    with pytest.raises(ValueError, match="without elements"):
        topk.argmax(mx.zeros((2, 0)))


def test_plain_mlx_and_the_choice_agree():
    scores = mx.random.normal((3, 5000), key=mx.random.key(4))
    assert topk.graph(scores, 50).tolist() == topk.top_k(scores, 50).tolist()
