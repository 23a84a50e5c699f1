"""How the prompts that are waiting to be computed share a forward."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from arriero.runner.prefill import plan_chunks
from arriero.runner.prefix.store import Reuse
from arriero.runner.row import Row
from tests.helpers.engine_runs import submit


def waiting(lengths: list[int]) -> list[Row]:
    """Rows with so many prompt tokens left to be prefilled, the oldest first."""
    rows = [Row(submit(str(index), [1] * (length + 1)), 1, 0) for index, length in enumerate(lengths)]
    for row in rows:
        row.admit(Reuse([], 0, 0), 0)
    return rows


def planned(lengths: list[int], budget: int) -> list[int]:
    rows = waiting(lengths)
    found = {chunk.row: chunk for chunk in plan_chunks(rows, budget)}
    assert list(found) == [row for row in rows if row in found]
    assert all(chunk.start == row.position for row, chunk in found.items())
    return [found[row].length if row in found else 0 for row in rows]


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), max_size=8), st.integers(0, 60))
def test_a_forward_is_filled_as_far_as_there_are_tokens(lengths, budget):
    shares = planned(lengths, budget)
    assert sum(shares) == min(budget, sum(lengths))
    assert all(share <= length for share, length in zip(shares, lengths, strict=True))


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(0, 60))
def test_the_oldest_row_gets_half_of_it_whatever_waits_behind(lengths, budget):
    assert planned(lengths, budget)[0] >= min(lengths[0], (budget + 1) // 2)


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(0, 60))
def test_of_the_others_none_gets_any_before_a_shorter_one_has_all(lengths, budget):
    shares = planned(lengths, budget)
    for i in range(1, len(lengths)):
        for j in range(1, len(lengths)):
            if lengths[i] < lengths[j] and shares[j]:
                assert shares[i] == lengths[i]


def test_rows_of_one_length_come_one_after_the_other():
    assert planned([20, 20, 20], 30) == [20, 10, 0]
