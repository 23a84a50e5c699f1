"""The choice of blocks: which ones, in what order, and that it depends on nothing but the query."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from arriero.kernels import block_select as module
from arriero.kernels.block_select import block_select, dense_until, select

pytestmark = pytest.mark.usefixtures("kernels")

HEADS, WIDTH = 4, 24


def random(*shape: int, seed: int = 0, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def from_scores(scores: list[list[float]], positions: list[int], *, block: int, budget: int) -> list[list[int]]:
    """Through the public function: keys of width one are the scores, which must not be negative."""
    q = mx.ones((len(scores), 1, 1))
    keys = [mx.array(row, mx.float32)[:, None] for row in scores]
    how = {"scale": 1.0, "lengths": [1] * len(scores), "positions": positions, "block": block, "budget": budget}
    return np.array(block_select(q, keys, **how)).tolist()


def plain(q: mx.array, k: mx.array, positions: range, block: int, budget: int) -> list[list[int]]:
    """Scores in double precision, sorted in full."""
    queries, keys = np.array(q).astype(np.float64), np.array(k).astype(np.float64)
    rows = []
    for row, position in zip(queries, positions, strict=True):
        scores = np.maximum(row @ keys[: (position + 1) // block].T, 0).sum(axis=0)
        best = np.sort(np.argsort(-scores, kind="stable")[:budget]).tolist()
        rows.append(best + [-1] * (budget - len(best)))
    return rows


def test_the_best_two_of_four_blocks_are_chosen():
    assert from_scores([[0.1, 4, 2, 3]], [16], block=4, budget=2) == [[1, 3]]


def test_a_future_block_is_never_chosen_whatever_it_scores():
    assert from_scores([[0.1, 4, 2, 3, 1e30]], [16], block=4, budget=2) == [[1, 3]]
    assert from_scores([[0.1, 4, 2, 3, 1e30]], [19], block=4, budget=2) == [[1, 4]]


def test_missing_choices_are_minus_one():
    assert from_scores([[7.0, 9.0]], [4], block=4, budget=2) == [[0, -1]]
    assert from_scores([[7.0, 9.0]], [2], block=4, budget=2) == [[-1, -1]]


def test_rows_of_a_batch_are_independent():
    scores = [[0.1, 4, 2, 3], [9, 1, 8, 2], [5, 5, 5, 5]]
    assert from_scores(scores, [16, 16, 12], block=4, budget=2) == [[1, 3], [0, 2], [0, 1]]


def test_of_equal_scores_the_lower_block_is_chosen():
    assert from_scores([[1, 2, 1, 2, 2, 1]], [24], block=4, budget=2) == [[1, 3]]
    assert from_scores([[0, 0, 0, 0, 0, 3]], [24], block=4, budget=3) == [[0, 1, 5]]
    rows = from_scores([[1.0] * 3000], [11999], block=4, budget=700)
    assert rows == [list(range(700))]


def test_negative_products_count_as_nothing():
    q = mx.array([[[1.0, 0.0], [0.0, 1.0]]])
    keys = [mx.array([[5.0, -9.0], [3.0, 1.0], [-1.0, -1.0], [4.5, 0.0]])]
    how = {"scale": 1.0, "lengths": [1], "positions": [15], "block": 4, "budget": 2}
    assert block_select(q, keys, **how).tolist() == [[0, 3]]


def test_the_block_that_a_query_completes_competes_and_may_lose():
    assert from_scores([[3, 2, 1]], [11], block=4, budget=2) == [[0, 1]]
    assert from_scores([[1, 2, 3]], [11], block=4, budget=2) == [[1, 2]]


@pytest.mark.parametrize("block", [1, 4, 7])
def test_choices_equal_a_full_sort_in_double_precision(block):
    lengths, positions, budget = [20, 1, 9], [30 * block, 100 * block - 1, 0], 25
    q = random(30, HEADS, WIDTH, seed=2)
    keys = [
        random((p + n) // block + 3, WIDTH, seed=i) for i, (p, n) in enumerate(zip(positions, lengths, strict=True))
    ]
    got = block_select(q, keys, scale=WIDTH**-0.5, lengths=lengths, positions=positions, block=block, budget=budget)
    assert got.dtype == mx.int32
    start, want = 0, []
    for k, length, position in zip(keys, lengths, positions, strict=True):
        want += plain(q[start : start + length], k, range(position, position + length), block, budget)
        start += length
    assert got.tolist() == want


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(0, 300), st.sampled_from(["f32", "bf16"]))
def test_any_cut_of_a_sequence_gives_the_same_choice(pieces, position, kind):
    dtype = {"f32": mx.float32, "bf16": mx.bfloat16}[kind]
    total = sum(pieces)
    q, k = random(total, HEADS, WIDTH, seed=total, dtype=dtype), random((position + total) // 4, WIDTH, dtype=dtype)
    how: dict[str, Any] = {"scale": 1.0, "block": 4, "budget": 16}
    whole = block_select(q, [k], lengths=[total], positions=[position], **how).tolist()
    start, rows = 0, []
    for length in pieces:
        part = q[start : start + length]
        here = position + start
        rows += block_select(part, [k[: (here + length) // 4]], lengths=[length], positions=[here], **how).tolist()
        start += length
    assert rows == whole


def test_tiles_do_not_change_a_choice(monkeypatch):
    q, k = random(40, HEADS, WIDTH), random(110, WIDTH, seed=1)
    how: dict[str, Any] = {"scale": 1.0, "lengths": [40], "positions": [400], "block": 4, "budget": 16}
    whole = block_select(q, [k], **how).tolist()
    monkeypatch.setattr(module, "PRODUCT_BUDGET", 3 * 110 * HEADS)
    assert block_select(q, [k], **how).tolist() == whole


@pytest.mark.parametrize("block", [1, 3, 4])
@pytest.mark.parametrize("budget", [1, 5])
def test_before_dense_until_every_key_is_read_and_from_it_on_some_are_not(block, budget):
    edge = dense_until(block, budget)
    for position in range(edge + 3 * block):
        seen = (position + 1) // block
        read = min(seen, budget) * block + position + 1 - seen * block
        assert (read == position + 1) == (position < edge)


def test_scores_of_nan_come_last_but_before_what_cannot_be_seen():
    scores = mx.array([[np.nan, 1.0, np.nan, 5.0, 9.0]])
    assert select(scores, mx.array([4]), 3).tolist() == [[0, 1, 3]]
    assert select(scores, mx.array([1]), 3).tolist() == [[0, -1, -1]]
    assert select(scores, mx.array([0]), 3).tolist() == [[-1, -1, -1]]
    assert select(scores, mx.array([5]), 7).tolist() == [[0, 1, 2, 3, 4, -1, -1]]


def test_keys_of_nan_are_chosen_last():
    assert from_scores([[np.nan, 1, 0, 5]], [16], block=4, budget=2) == [[1, 3]]
    assert from_scores([[np.nan, np.nan, 0, np.nan]], [16], block=4, budget=2) == [[0, 2]]


def test_what_does_not_fit_is_refused():
    q, k = random(4, HEADS, WIDTH), random(10, WIDTH)
    good: dict[str, Any] = {"scale": 1.0, "lengths": [4], "positions": [36], "block": 4, "budget": 3}
    assert block_select(q, [k], **good).shape == (4, 3)
    for wrong, match in (
        ({"lengths": [3]}, "4 were given"),
        ({"positions": [40]}, "11 complete blocks"),
        ({"budget": 0}, "selects nothing"),
        ({"block": 0}, "selects nothing"),
    ):
        with pytest.raises(ValueError, match=match):
            block_select(q, [k], **{**good, **wrong})
    with pytest.raises(ValueError, match="do not hold"):
        block_select(q, [k[:, 1:]], **good)
