"""Depths from scripted timings: what pays is drafted, what does not is parked, and a request never loses much."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from arriero.runner.speculation.controller import CREDIT, LONGEST_WAIT, REST, DepthController, WholeBlocks
from arriero.runner.speculation.costs import TRUSTED, Costs, Rates

PLAIN = 0.02


def simulate(
    controller: DepthController | WholeBlocks,
    rounds: int,
    cost: Callable[[int], float],
    chance: Callable[[int], float],
    *,
    seed: int = 0,
    most: int = 16,
) -> tuple[list[int], int, float]:
    """Depths, tokens and seconds of a request."""
    rng = random.Random(seed)
    depths, tokens, seconds = [], 0, 0.0
    controller.begin()
    for _ in range(rounds):
        depth = controller.next(most)
        accepted = 0
        while accepted < depth and rng.random() < chance(accepted):
            accepted += 1
        controller.observe(depth, accepted, depth, accepted + 1, cost(depth))
        depths.append(depth)
        tokens += accepted + 1
        seconds += cost(depth)
    return depths, tokens, seconds


def flat(depth: int) -> float:
    return PLAIN * (1 + 0.0125 * depth) if depth else PLAIN


def steep(depth: int) -> float:
    return PLAIN * (1 + 0.63 * depth)


RATES = (0.90, 0.82, 0.72, 0.60, 0.48, 0.40, 0.34, 0.3)


def fading(position: int) -> float:
    return RATES[min(position, len(RATES) - 1)]


def test_cheap_rounds_go_deep() -> None:
    """R-63."""
    depths, _, _ = simulate(DepthController(), 600, flat, fading)
    assert sum(depths[-200:]) / 200 >= 5


def test_dear_rounds_stay_shallow() -> None:
    depths, _, _ = simulate(DepthController(), 600, lambda d: PLAIN * (1 + 0.39 * d), fading)
    assert 0 < sum(depths[-200:]) / 200 <= 4


def test_drafting_that_does_not_pay_is_parked_and_hardly_tried() -> None:
    controller = DepthController()
    depths, _, _ = simulate(controller, 4096, steep, lambda i: 0.4)
    assert sum(depth > 0 for depth in depths[:100]) > 0
    assert sum(depth > 0 for depth in depths[-2048:]) <= 12
    assert controller.wait == LONGEST_WAIT


@pytest.mark.parametrize("chance", [0.0, 0.2, 0.5])
@pytest.mark.parametrize("slope", [0.1, 0.5, 1.0, 2.5])
@pytest.mark.parametrize("length", [200, 1000])
def test_a_request_keeps_97_percent_of_plain_speed_whatever_drafting_gives(
    length: int, slope: float, chance: float
) -> None:
    controller = DepthController()
    for request in range(6):
        _, tokens, seconds = simulate(
            controller, length, lambda d: PLAIN * (1 + slope * d), lambda i: chance, seed=request
        )
        assert tokens * PLAIN / seconds > 0.97


def test_a_request_that_takes_no_drafts_loses_little_after_others_that_took_all() -> None:
    controller = DepthController(8)
    simulate(controller, 400, steep, lambda i: 1.0)
    _, tokens, seconds = simulate(controller, 200, lambda d: PLAIN * (1 + 0.3 * d), lambda i: 0.0)
    assert tokens * PLAIN / seconds > 0.96


def test_the_search_goes_one_beyond_what_is_trusted_and_never_beyond_the_limit() -> None:
    """R-64."""
    controller = DepthController(5)
    controller.begin()
    for _ in range(500):
        depth = controller.next(16)
        assert depth <= min(controller.rates.frontier + 1, 5)
        controller.observe(depth, depth, depth, depth + 1, flat(depth))
    assert controller.next(16) == 5
    assert controller.next(2) <= 2
    assert controller.next(0) == 0


def test_the_first_rounds_are_plain_and_then_one_draft() -> None:
    depths, _, _ = simulate(DepthController(), 12, flat, lambda i: 1.0)
    first = next(depth for depth in depths if depth)
    assert depths[:2] == [0, 0]
    assert first == 1


def test_one_stall_moves_a_cost_by_7_5_percent_and_a_lasting_change_arrives() -> None:
    """R-65."""
    costs = Costs()
    costs.add(3, 1.0)
    costs.add(3, 3.0)
    assert costs.of(3) == pytest.approx(1.075)
    for _ in range(60):
        costs.add(3, 3.0)
    assert costs.of(3) == pytest.approx(3.0, rel=0.02)


def test_a_stall_does_not_park_what_pays() -> None:
    controller = DepthController()
    simulate(controller, 300, flat, lambda i: 0.8)
    before = controller.selected(16)
    assert before > 0
    controller.observe(before, before, before, before + 1, flat(before))
    controller.observe(before, before, before, before + 1, 0.5)
    assert controller.selected(16) > 0


def test_only_the_second_round_of_a_depth_is_a_sample_of_its_cost() -> None:
    controller = DepthController()
    controller.begin()
    controller.observe(0, 0, 0, 1, 9.0)
    assert 0 not in controller.costs
    controller.observe(0, 0, 0, 1, 1.0)
    assert controller.costs.of(0) == 1.0
    controller.observe(2, 1, 2, 2, 9.0)
    assert 2 not in controller.costs
    controller.begin()
    controller.observe(2, 1, 2, 2, 9.0)
    assert 2 not in controller.costs


def test_drafts_of_changing_number_are_sampled_every_round() -> None:
    controller = DepthController(8, steady=False)
    controller.begin()
    controller.observe(0, 0, 0, 1, 1.0)
    controller.observe(5, 1, 5, 2, 3.0)
    controller.observe(2, 1, 2, 2, 2.0)
    assert controller.costs.known() == {2: 2.0, 5: 3.0}


def test_costs_are_straight_between_what_was_measured_and_flat_beyond() -> None:
    costs = Costs()
    costs.add(1, 1.0)
    costs.add(4, 4.0)
    assert [costs.of(depth) for depth in (0, 1, 2, 3, 4, 9)] == pytest.approx([1, 1, 2, 3, 4, 4])
    with pytest.raises(KeyError):
        Costs().of(0)


def test_positions_that_were_not_judged_teach_nothing() -> None:
    """R-67."""
    rates = Rates()
    for _ in range(TRUSTED):
        rates.add(accepted=2, judged=2)
    assert rates.frontier == 2
    assert rates.rate(5) == 1.0
    for _ in range(TRUSTED):
        rates.add(accepted=2, judged=3)
    assert rates.rate(2) == 0.0
    assert rates.rate(7) == 0.0


def test_drafting_starts_again_when_it_pays_again() -> None:
    controller = DepthController()
    simulate(controller, 1500, steep, lambda i: 0.3)
    assert controller.next(16) == 0
    depths, _, _ = simulate(controller, 2500, flat, lambda i: 0.95)
    assert sum(depths[-300:]) / 300 > 2


def test_a_plain_step_is_measured_again_now_and_then() -> None:
    depths, _, _ = simulate(DepthController(), 2000, flat, lambda i: 0.9)
    assert 4 <= sum(depth == 0 for depth in depths[200:]) <= 60


def test_a_slow_moment_of_the_first_plain_steps_makes_no_draft_look_cheap() -> None:
    """Plain steps are measured again only after long, if drafting is thought to pay."""
    controller = DepthController()
    controller.begin()
    for seconds in (3 * PLAIN, 3 * PLAIN):
        assert controller.next(8) == 0
        controller.observe(0, 0, 0, 1, seconds)
    depths, _, _ = simulate(controller, 200, lambda depth: PLAIN * (1 + 0.2 * depth), lambda _: 0.0)
    assert sum(depth > 0 for depth in depths) < 40


def test_what_is_parked_rests_and_is_tried_again_no_later() -> None:
    controller = DepthController()
    simulate(controller, 400, flat, lambda _: 0.0)
    tried, rested = [], 0
    for step in range(3 * LONGEST_WAIT):
        if rested:
            rested -= 1
            continue
        depth = controller.next(8)
        controller.observe(depth, 0, depth, 1, flat(depth))
        if depth:
            tried.append(step)
        else:
            rested = controller.rest()
            assert rested <= REST
    assert len(tried) >= 4
    assert max(b - a for a, b in pairwise(tried)) <= LONGEST_WAIT + REST


def test_nothing_rests_that_pays_or_was_never_tried() -> None:
    fresh, paying = DepthController(), DepthController()
    fresh.begin()
    fresh.observe(0, 0, 0, 1, PLAIN)
    assert fresh.rest() == 0
    simulate(paying, 400, flat, lambda _: 0.9)
    assert paying.rest() == 0


def test_whole_blocks_are_drafted_whatever_stays() -> None:
    """R-79."""
    depths, _, _ = simulate(WholeBlocks(7), 60, steep, lambda i: 0.1)
    assert set(depths[WholeBlocks.PLAIN :]) == {7}
    controller = WholeBlocks(7)
    simulate(controller, 5, flat, lambda i: 1.0)
    assert controller.next(4) == 4


def test_whole_blocks_that_lose_are_given_up_for_the_request() -> None:
    controller = WholeBlocks(7)
    depths, _, _ = simulate(controller, 400, steep, lambda i: 0.1)
    assert controller.parked
    assert set(depths[100:]) == {0}
    depths, _, _ = simulate(controller, 400, flat, lambda i: 0.9)
    assert not controller.parked
    assert set(depths) == {7}


def test_whole_blocks_are_not_given_up_because_a_plain_step_was_faster_when_the_text_was_short() -> None:
    controller = WholeBlocks(7)
    simulate(controller, 20, flat, lambda i: 0.5)
    depths, _, _ = simulate(controller, 400, lambda depth: 4 * flat(depth), lambda i: 0.5)
    assert not controller.parked
    assert depths.count(0) <= 4


def test_whole_blocks_wait_for_a_plain_step_whose_length_is_known() -> None:
    controller = WholeBlocks(7)
    for _ in range(4):
        controller.begin()
        assert controller.next(7) == 0
        controller.observe(0, 0, 0, 1, PLAIN)
    controller.observe(0, 0, 0, 1, PLAIN)
    assert controller.next(7) == 7


def test_the_credit_is_all_that_a_short_request_can_lose() -> None:
    controller = DepthController()
    simulate(controller, 60, steep, lambda i: 0.0)
    for length in (5, 20, 50):
        _, tokens, seconds = simulate(controller, length, steep, lambda i: 0.0)
        assert seconds <= tokens * PLAIN / 0.98 + CREDIT * PLAIN + 1e-9
