"""Copies of a row's own text."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from arriero.runner.speculation.lookup import LONGEST, SHORTEST, Lookup


def known(*tokens: int) -> Lookup:
    lookup = Lookup()
    lookup.extend(np.array(tokens, np.int32))
    return lookup


def test_what_followed_the_last_tokens_before_is_copied() -> None:
    assert known(1, 2, 3, 4, 5, 6, 9, 1, 2, 3).find(4) == [4, 5, 6, 9]


def test_no_more_than_asked_and_twice_what_agrees() -> None:
    lookup = known(7, 1, 2, 3, *range(10, 40), 8, 1, 2, 3)
    assert lookup.find(2) == [10, 11]
    assert lookup.find(20) == list(range(10, 16))
    assert lookup.find(0) == []


def test_two_agreeing_tokens_are_too_few() -> None:
    assert known(5, 1, 2, 3, 4, 9, 1, 2).find(4) == []


def test_the_longest_agreement_wins_over_the_latest() -> None:
    assert known(0, 1, 2, 3, 10, 9, 1, 2, 3, 11, 0, 1, 2, 3).find(1) == [10]


def test_among_equal_agreements_the_latest_wins() -> None:
    assert known(8, 1, 2, 3, 10, 9, 1, 2, 3, 11, 0, 1, 2, 3).find(1) == [11]


def test_a_loop_goes_on() -> None:
    assert known(4, 1, 2, 3, 1, 2, 3, 1, 2, 3).find(5) == [1, 2, 3, 1, 2]
    assert known(9, 6, 6, 6, 6).find(3) == [6, 6, 6]


def test_text_that_does_not_repeat_gives_nothing() -> None:
    assert known(*range(50)).find(8) == []
    assert Lookup().find(8) == []


def test_tokens_of_the_reply_are_searched_too() -> None:
    """Catalogue 46."""
    lookup = known(1, 2)
    for token in (3, 4, 5, 6, 7, 3, 4, 5):
        lookup.extend(np.array([token], np.int32))
    assert lookup.held == 10
    assert lookup.find(2) == [6, 7]


@given(st.lists(st.integers(0, 3), max_size=80), st.integers(1, 12))
def test_every_copy_follows_an_agreement_as_long_as_there_is(tokens: list[int], most: int) -> None:
    found = known(*tokens).find(most)
    last = len(tokens) - 1
    agreements = {}
    for end in range(last):
        agreeing = 0
        while agreeing <= end and agreeing < LONGEST and tokens[end - agreeing] == tokens[last - agreeing]:
            agreeing += 1
        agreements[end] = agreeing
    best = max(agreements.values(), default=0)
    if best < SHORTEST:
        assert found == []
        return
    end = max(end for end, agreeing in agreements.items() if agreeing == best)
    assert len(found) == min(most, 2 * best)
    assert found[: last - end] == tokens[end + 1 : end + 1 + len(found)]
