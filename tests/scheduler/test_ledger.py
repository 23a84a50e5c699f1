"""The ledger's arithmetic: promises, floors, shares."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arriero.errors import OutOfMemory
from arriero.scheduler.ledger import Account, Ledger


def account(name: str = "a", weights: int = 50, row: int = 0, rows: int = 1, use: int = 0) -> Account:
    return Account(name, weights, scratch=0, row=row, rows=rows, use=lambda: use)


def test_a_promise_counts_although_nothing_is_resident():
    ledger = Ledger(lambda: 100)
    ledger.open(account(weights=60))
    assert not ledger.fits(account("b", weights=50))
    assert ledger.reserved == 60


def test_an_account_needs_its_weights_its_scratch_and_one_row():
    ledger = Ledger(lambda: 100)
    assert ledger.fits(Account("a", 60, scratch=20, row=20, rows=8))
    assert not ledger.fits(Account("a", 60, scratch=20, row=21, rows=8))


def test_a_refusal_has_both_figures_of_this_moment():
    limit = [100]
    ledger = Ledger(lambda: limit[0])
    for _ in range(2):
        with pytest.raises(OutOfMemory, match=rf"requires 150 bytes .* only {limit[0]} bytes"):
            ledger.check_alone(account(weights=150))
        limit[0] = 120
    limit[0] = 150
    ledger.check_alone(account(weights=150))


def test_closing_an_account_gives_its_promise_back_once():
    ledger = Ledger(lambda: 100)
    first = account()
    ledger.open(first)
    ledger.close(first)
    ledger.close(first)
    assert ledger.reserved == 0


def test_a_lone_model_may_use_what_it_can_and_no_more():
    ledger = Ledger(lambda: 1000)
    alone = account(weights=100, row=50, rows=4)
    ledger.open(alone)
    assert ledger.divide() == [alone]
    assert alone.granted == 200
    assert ledger.divide() == []


def test_a_newcomer_shrinks_the_share_of_a_model_down_to_what_its_rows_hold():
    ledger = Ledger(lambda: 1000)
    busy = account(weights=100, row=50, rows=20, use=300)
    ledger.open(busy)
    ledger.divide()
    assert busy.granted == 900
    newcomer = account("b", weights=400, row=100, rows=4)
    assert ledger.free_beside(newcomer) == 600
    ledger.open(newcomer)
    ledger.divide()
    assert busy.granted >= 300
    assert newcomer.granted >= 100
    assert ledger.reserved <= 1000


amounts = st.tuples(st.integers(0, 300), st.integers(0, 80), st.integers(1, 8), st.integers(0, 400))


@given(limit=st.integers(100, 1000), models=st.lists(amounts, min_size=1, max_size=6))
def test_whatever_is_admitted_never_more_than_the_limit_is_promised(limit, models):
    ledger = Ledger(lambda: limit)
    for weights, row, rows, use in models:
        new = account("m", weights, row, rows, use)
        if ledger.fits(new):
            ledger.open(new)
            ledger.divide()
            assert ledger.reserved <= limit
            assert new.granted >= min(row, limit)
