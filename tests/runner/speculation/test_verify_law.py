"""The law of what rounds give is the target's: summed over everything, and drawn."""

from __future__ import annotations

from functools import cache, partial

import mlx.core as mx
import numpy as np
import pytest

from arriero.runner.messages import SamplingOptions
from arriero.runner.sampling import Distribution, Sampler
from arriero.runner.speculation.picks import Picker
from arriero.runner.speculation.verify import Proposal, Rule, chances, leading, replacement, rule_for, verify
from tests.helpers import speculation_law as laws
from tests.helpers.chi_square import chi_square, improbable
from tests.helpers.sampling_law import law
from tests.helpers.speculation_law import MISTAKES, World, gap, law_of_rounds, plain_law, ratio_round, same_round

HISTORY = (1, 2)


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_the_ratio_rule_gives_the_targets_law(seed: int, sparse: bool) -> None:
    world = World(seed, sparse=sparse)
    found = law_of_rounds(world, HISTORY, 4, partial(ratio_round, world, accept=laws.accept, residual=laws.residual))
    assert sum(found.values()) == pytest.approx(1, abs=1e-12)
    assert gap(found, plain_law(world, HISTORY, 4)) < 1e-12


@pytest.mark.parametrize("sparse", [True, False])
def test_the_targets_own_draws_give_its_law(sparse: bool) -> None:
    world = World(5, sparse=sparse)
    assert gap(law_of_rounds(world, HISTORY, 4, partial(same_round, world)), plain_law(world, HISTORY, 4)) < 1e-12


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_rule_shows(mistake: str) -> None:
    world = World(0)
    accept, residual = MISTAKES[mistake]
    found = law_of_rounds(world, HISTORY, 4, partial(ratio_round, world, accept=accept, residual=residual))
    assert gap(found, plain_law(world, HISTORY, 4)) > 5e-3


def as_distribution(row: np.ndarray, form: str) -> Distribution:
    """One row, dense or with its tokens named in some order; sparse ones leave out what has no mass."""
    if form == "dense":
        return Distribution(mx.array(row[None].astype(np.float32)), None, len(row))
    named = np.flatnonzero(row)[::-1].copy()
    return Distribution(mx.array(row[named][None].astype(np.float32)), mx.array(named[None].astype(np.int32)), len(row))


@pytest.mark.parametrize("q_form", ["dense", "sparse"])
@pytest.mark.parametrize("p_form", ["dense", "sparse"])
def test_the_graph_computes_the_rule_and_so_its_law(p_form: str, q_form: str) -> None:
    world = World(1, depth=2)

    @cache
    def judged(p: tuple[float, ...], q: tuple[float, ...], token: int) -> tuple[float, np.ndarray]:
        target, drawn = as_distribution(np.array(p), p_form), as_distribution(np.array(q), q_form)
        chance = chances(target, drawn, mx.array([token], mx.int32))
        both = Distribution(
            mx.concatenate([target.probs, target.probs]),
            None if target.ids is None else mx.concatenate([target.ids, target.ids]),
            target.vocab_size,
        )
        rest = replacement(both, drawn).dense().probs
        assert np.allclose(np.array(rest[1]), p, atol=1e-6)
        return min(1.0, float(np.array(chance)[0])), np.array(rest[0], np.float64)

    found = law_of_rounds(
        world,
        HISTORY,
        3,
        partial(
            ratio_round,
            world,
            accept=lambda p, q, token: judged(tuple(p), tuple(q), token)[0],
            residual=lambda p, q, token: judged(tuple(p), tuple(q), token)[1],
        ),
    )
    assert gap(found, plain_law(world, HISTORY, 3)) < 1e-6


def test_where_target_and_draft_agree_a_replacement_is_drawn_from_the_target() -> None:
    row = np.array([0.25, 0.5, 0.25, 0.0])
    target = as_distribution(row, "dense")
    both = Distribution(mx.concatenate([target.probs, target.probs]), None, 4)
    assert np.array(replacement(both, target).probs).tolist() == [row.tolist(), row.tolist()]


@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_a_draft_that_its_own_law_cannot_give_does_not_stay(form: str) -> None:
    target = as_distribution(np.array([0.25, 0.5, 0.25, 0.0]), form)
    drawn = as_distribution(np.array([0.0, 0.5, 0.25, 0.25]), form)
    assert [float(np.array(chances(target, drawn, mx.array([token]))[0])) for token in range(4)] == [0, 1, 1, 0]


def test_only_leading_drafts_stay() -> None:
    assert int(np.array(leading(mx.array([True, True, False, True])))) == 2
    assert int(np.array(leading(mx.array([False, True])))) == 0
    assert int(np.array(leading(mx.array([True])))) == 1


CONFIGURATIONS = {
    "temperature": {"temperature": 1.5, "top_k": 0, "top_p": 1.0},
    "cold": {"temperature": 0.6, "top_k": 0, "top_p": 1.0},
    "top-k": {"temperature": 1.0, "top_k": 5, "top_p": 1.0},
    "top-p": {"temperature": 1.0, "top_k": 0, "top_p": 0.8},
    "min-p": {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.1},
    "penalties": {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "repeat_penalty": 1.4,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repeat_last_n": 5,
    },
    "all": {"temperature": 0.9, "top_k": 9, "top_p": 0.9, "min_p": 0.02, "repeat_penalty": 1.2, "repeat_last_n": 5},
}
DRAWS, VOCAB = 20_000, 12


@pytest.mark.parametrize("form", ["dense", "candidates"])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_20000_judged_drafts_are_drawn_from_the_targets_law(name: str, form: str) -> None:
    """Every line of one long block is a draft of its own here, with the same two laws."""
    rng = np.random.default_rng(3)
    scores, guess = rng.normal(0, 1.5, VOCAB).astype(np.float32), rng.normal(0, 1.5, VOCAB).astype(np.float32)
    options = SamplingOptions(**CONFIGURATIONS[name], seed=11)
    history = [3, 3, 1, 7, 3, 9, 2]
    sampler = Sampler(VOCAB, 64)
    sampler.add("row", options, history)
    target = sampler.distribution("row", mx.array(np.tile(scores, (DRAWS, 1))))
    if form == "dense":
        drawn = sampler.distribution("row", mx.array(np.tile(guess, (DRAWS, 1))))
    else:
        ids = mx.array(np.tile(np.argsort(-guess)[:6].astype(np.int32), (DRAWS, 1)))
        weights = mx.softmax(mx.take_along_axis(mx.array(np.tile(guess, (DRAWS, 1))), ids, axis=-1), axis=-1)
        drawn = Distribution(weights, ids, VOCAB)
    drafts = sampler.draw("row", drawn)
    kept = sampler.accept("row", chances(target, drawn, drafts))
    bonus = Distribution(
        mx.concatenate([target.probs, target.probs[:1]]),
        None if target.ids is None else mx.concatenate([target.ids, target.ids[:1]]),
        VOCAB,
    )
    others = sampler.draw("row", replacement(bonus, drawn))[:-1]
    said = np.array(mx.where(kept, drafts, others))
    wanted = law(scores, options, history)
    statistic, freedom = chi_square(np.bincount(said, minlength=VOCAB), wanted)
    assert not improbable(statistic, freedom)
    # As many stay as can.
    proposed = np.array(drawn.dense().probs[0])
    assert np.array(kept).mean() == pytest.approx(np.minimum(wanted, proposed).sum(), abs=0.015)


@pytest.mark.parametrize("name", [*CONFIGURATIONS, "greedy"])
def test_every_line_is_transformed_as_plain_decoding_would_at_its_place(name: str) -> None:
    options = SamplingOptions(**CONFIGURATIONS.get(name, {"temperature": 0.0, "repeat_penalty": 1.4}))
    rng = np.random.default_rng(8)
    for _ in range(8):
        history = rng.integers(0, VOCAB, 6).tolist()
        drafts = rng.integers(0, VOCAB, 4).tolist()
        logits = rng.normal(0, 2, (5, VOCAB)).astype(np.float32)
        sampler = Sampler(VOCAB, 64)
        sampler.add("row", options, history)
        found = sampler.distribution("row", mx.array(logits), mx.array(drafts, mx.int32)).dense().probs
        for i in range(5):
            assert np.allclose(np.array(found[i]), law(logits[i], options, history + drafts[:i]), atol=1e-5)


def test_a_wrong_number_of_lines_is_refused() -> None:
    sampler = Sampler(VOCAB, 64)
    sampler.add("row", SamplingOptions(temperature=0.0), [1])
    with pytest.raises(ValueError, match="3 lines of logits for 3 drafts; one more"):
        verify(sampler, "row", mx.zeros((3, VOCAB)), Proposal(mx.zeros((3,), mx.int32)), Rule.BEST)


def test_a_ratio_without_a_law_is_refused() -> None:
    sampler = Sampler(VOCAB, 64)
    sampler.add("row", SamplingOptions(), [1])
    with pytest.raises(ValueError, match="nobody knows what they were drawn from"):
        verify(sampler, "row", mx.zeros((3, VOCAB)), Proposal(mx.zeros((2,), mx.int32)), Rule.RATIO)


@pytest.mark.parametrize(
    ("options", "drawn", "rule"),
    [
        (SamplingOptions(temperature=0.0), True, Rule.BEST),
        (SamplingOptions(temperature=0.7), True, Rule.RATIO),
        (SamplingOptions(temperature=0.7), False, Rule.SAME),
        (SamplingOptions(temperature=0.7, seed=3), True, Rule.SAME),
        (SamplingOptions(temperature=0.7, seed=0), True, Rule.SAME),
    ],
)
def test_a_seeded_row_and_certain_drafts_are_judged_by_the_targets_own_draws(
    options: SamplingOptions, drawn: bool, rule: Rule
) -> None:
    assert rule_for(options, drawn=drawn) is rule


def picker(sampler: Sampler, rule: Rule, *, temperature: float = 0.5, conditional: bool = True) -> Picker:
    return Picker(sampler, "row", rule, temperature=temperature, vocab_size=VOCAB, conditional=conditional)


def test_a_chain_of_picks_sees_its_earlier_tokens_in_the_penalties() -> None:
    """R-61."""
    sampler = Sampler(VOCAB, 64)
    sampler.add("row", SamplingOptions(temperature=0.0, repeat_penalty=2.0, repeat_last_n=4), [0])
    pick = picker(sampler, Rule.BEST)
    scores = mx.array([[0.0, 5.0, 4.0, 3.0] + [0.0] * 8])
    assert [int(np.array(pick(scores))[0]) for _ in range(3)] == [1, 2, 3]


def test_candidates_are_drawn_with_the_temperature_and_nothing_else() -> None:
    """R-77."""
    sampler = Sampler(VOCAB, 64)
    options = SamplingOptions(temperature=0.5, top_k=1, top_p=0.1, repeat_penalty=3.0)
    sampler.add("row", options, [4, 7])
    pick = picker(sampler, Rule.RATIO)
    ids, scores = mx.array([[4, 7, 2]], mx.int32), mx.array([[1.0, 0.5, 0.0]])
    assert int(np.array(pick(scores, ids))[0]) in (4, 7, 2)
    drawn = pick.law
    assert drawn is not None
    weights = np.exp(np.array([2.0, 1.0, 0.0]))
    assert np.allclose(np.array(drawn.probs[0]), weights / weights.sum(), atol=1e-6)


def test_rows_of_a_block_that_are_guessed_apart_are_not_drawn_by_chance() -> None:
    sampler = Sampler(VOCAB, 64)
    sampler.add("row", SamplingOptions(temperature=1.0, seed=1), [4])
    pick = picker(sampler, Rule.SAME, conditional=False)
    scores = np.zeros((3, VOCAB), np.float32)
    scores[[0, 1, 2], [5, 2, 9]] = 0.1
    assert np.array(pick(mx.array(scores))).tolist() == [5, 2, 9]
    assert pick.law is None
