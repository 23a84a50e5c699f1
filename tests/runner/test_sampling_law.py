"""Tokens follow the documented law: the distribution exactly, the draws by statistics."""

from __future__ import annotations

import random

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arriero.runner.messages import SamplingOptions
from arriero.runner.sampling import Distribution, Sampler, stacked
from arriero.runner.sampling.randomness import Stream, gumbel, keys, uniform
from tests.helpers.sampling_law import chi_square, law

CRITICAL = 42.7
"""Of chi-square with 7 degrees of freedom: passed by chance in fewer than 1 of 10^6 runs; seeds are fixed anyway."""
DRAWS = 40_000

LAWS = {
    "plain": SamplingOptions(temperature=1.0, top_k=0, top_p=1.0),
    "cold": SamplingOptions(temperature=0.6, top_k=0, top_p=1.0),
    "defaults": SamplingOptions(),
    "top k": SamplingOptions(temperature=1.0, top_k=4, top_p=1.0),
    "top p": SamplingOptions(temperature=1.2, top_k=0, top_p=0.8),
    "min p": SamplingOptions(temperature=1.0, top_k=0, top_p=1.0, min_p=0.15),
    "typical": SamplingOptions(temperature=1.0, top_k=0, top_p=1.0, typical_p=0.7),
    "all": SamplingOptions(
        temperature=1.3,
        top_k=6,
        top_p=0.95,
        min_p=0.05,
        typical_p=0.95,
        repeat_penalty=1.2,
        presence_penalty=0.1,
        frequency_penalty=0.05,
        repeat_last_n=4,
    ),
}
HISTORY = [5, 1, 2, 2, 7]
LOGITS = np.array([1.5, 0.8, -0.4, 1.1, -1.2, 0.2, 0.6, -0.1], np.float32)


def counts_of(options: SamplingOptions, rows: int = 400) -> np.ndarray:
    """Draws by many rows of their own seeds; each row is new for every draw, so that the history stays."""
    counts = np.zeros(8, np.int64)
    logits = mx.broadcast_to(mx.array(LOGITS), (rows, 8))
    for step in range(DRAWS // rows):
        made = Sampler(8, 4096)
        for row in range(rows):
            seeded = {**{f: getattr(options, f) for f in options.__struct_fields__}, "seed": step * rows + row}
            made.add(row, SamplingOptions(**seeded), HISTORY)
        counts += np.bincount(made.sample(range(rows), logits).read_tokens(), minlength=8)
    return counts


@pytest.mark.parametrize("name", LAWS)
def test_draws_follow_the_law_of_the_reference(name):
    assert chi_square(counts_of(LAWS[name]), law(LOGITS, LAWS[name], HISTORY)) < CRITICAL


def test_draws_of_one_row_over_time_follow_the_law():
    made = Sampler(8, 4096)
    rows = range(50)
    for row in rows:
        made.add(row, SamplingOptions(temperature=1.0, top_k=0, top_p=1.0, seed=row), [])
    logits = mx.broadcast_to(mx.array(LOGITS), (50, 8))
    drawn = np.array([made.sample(rows, logits).read_tokens() for _ in range(DRAWS // 50)])
    probs = law(LOGITS, LAWS["plain"], [])
    assert chi_square(np.bincount(drawn.ravel(), minlength=8), probs) < CRITICAL
    pairs = np.zeros((8, 8))
    np.add.at(pairs, (drawn[:-1].ravel(), drawn[1:].ravel()), 1)
    # 63 degrees of freedom: 140 is passed by chance in fewer than 1 of 10^6 runs.
    assert chi_square(pairs.ravel(), np.outer(probs, probs).ravel()) < 140


def test_the_statistic_finds_a_law_that_is_off_by_two_percent_of_the_mass():
    counts = counts_of(LAWS["plain"])
    probs = law(LOGITS, LAWS["plain"], HISTORY)
    for token in range(8):
        off = probs.copy()
        off[token] += 0.02
        off[(token + 1) % 8] -= 0.02
        # At least 40000 · 0.02² · (1/p + 1/q) = 76 and more above the 7 expected: seen with a power above 0.99.
        assert chi_square(counts, off) > CRITICAL


CHOICES = {
    "temperature": (0.0, 0.3, 1.0, 2.5),
    "top_k": (-1, 0, 1, 3, 30, 100),
    "top_p": (-1.0, 0.0, 0.35, 0.9, 1.0, 2.0),
    "min_p": (0.0, 0.05, 0.5, 1.0, 1.5),
    "typical_p": (0.0, 0.4, 0.9, 1.0),
    "repeat_last_n": (-1, 0, 1, 3, 64),
    "repeat_penalty": (-1.0, 0.0, 0.8, 1.0, 1.5),
    "presence_penalty": (0.0, -0.5, 0.7),
    "frequency_penalty": (0.0, -0.2, 0.3),
}


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_the_distribution_equals_the_reference_for_any_options(seed):
    chance = random.Random(seed)
    for _ in range(12):
        options = SamplingOptions(**{name: chance.choice(values) for name, values in CHOICES.items()})
        history = [chance.randrange(40) for _ in range(chance.randrange(13))]
        logits = np.array([chance.gauss(0, 2) for _ in range(40)], np.float32)
        made = Sampler(40, 8)
        made.add(0, options, history)
        found = made.distribution(0, mx.array(logits)[None]).dense()
        wanted = law(logits, options, history, context=8)
        assert np.allclose(np.array(found.probs)[0], wanted, atol=2e-5), (options, history)


def sparse(rows: list[dict[int, float]], width: int, vocab: int) -> Distribution:
    ids = np.full((len(rows), width), -1, np.int32)
    probs = np.zeros((len(rows), width), np.float32)
    for i, row in enumerate(rows):
        for j, (token, probability) in enumerate(row.items()):
            ids[i, j], probs[i, j] = token, probability
    return Distribution(mx.array(probs), mx.array(ids), vocab)


def test_the_residual_of_two_sparse_distributions_stays_on_the_support_of_the_target():
    left = sparse([{2: 0.7, 5: 0.3}], 2, 9).residual(sparse([{2: 0.2, 4: 0.8}], 2, 9))
    assert left.ids.tolist() == [[2, 5]]
    assert np.allclose(np.array(left.probs), [[0.625, 0.375]])


@pytest.mark.parametrize("target_sparse", [True, False])
@pytest.mark.parametrize("draft_sparse", [True, False])
def test_residuals_of_every_mix_equal_the_dense_one(target_sparse, draft_sparse):
    target_rows, draft_rows = [{2: 0.7, 8: 0.3}, {0: 1.0}], [{2: 0.2, 4: 0.7, 8: 0.1}, {8: 0.5, 1: 0.25, 0: 0.25}]
    target, draft = sparse(target_rows, 3, 9), sparse(draft_rows, 4, 9)
    dense_target, dense_draft = (np.array(d.dense().probs) for d in (target, draft))
    wanted = np.maximum(dense_target - dense_draft, 0)
    wanted /= wanted.sum(-1, keepdims=True)
    found = (target if target_sparse else target.dense()).residual(draft if draft_sparse else draft.dense())
    assert (found.ids is None) is not target_sparse
    assert np.allclose(np.array(found.dense().probs), wanted, atol=1e-6)


def test_where_draft_and_target_agree_the_residual_is_zero_and_not_nan():
    same = sparse([{2: 0.7, 5: 0.3}], 2, 9)
    assert same.residual(same).probs.tolist() == [[0.0, 0.0]]


def test_residuals_of_other_rows_or_vocabularies_are_refused():
    with pytest.raises(ValueError, match="must be the same"):
        sparse([{2: 1.0}], 1, 9).residual(sparse([{2: 1.0}], 1, 8))
    with pytest.raises(ValueError, match="must be the same"):
        sparse([{2: 1.0}], 1, 9).residual(sparse([{2: 1.0}, {2: 1.0}], 1, 9))


def test_the_probability_of_a_token_is_the_same_sparse_and_dense():
    found = sparse([{2: 0.7, 5: 0.3}, {1: 0.6, 8: 0.4}], 3, 9)
    for tokens in ([2, 8], [5, 2], [0, 0]):
        asked = mx.array(tokens, mx.int32)
        assert found.probability_of(asked).tolist() == found.dense().probability_of(asked).tolist()


def test_distributions_of_different_widths_are_stacked():
    one, two = sparse([{2: 1.0}], 1, 9), sparse([{1: 0.5, 3: 0.5}], 2, 9)
    both = stacked([one, two])
    assert both.ids.tolist() == [[2, -1], [1, 3]]
    dense = np.concatenate([np.array(part.dense().probs) for part in (one, two)])
    assert np.array_equal(np.array(both.dense().probs), dense)
    mixed = stacked([one, two.dense()])
    assert mixed.ids is None
    assert np.array_equal(np.array(mixed.probs), dense)
    assert both[1:].ids.tolist() == [[1, 3]]


def test_a_token_of_probability_zero_is_never_drawn():
    rows = 20_000
    one = sparse([{7: 0.0, 3: 1e-6, 4: 0.0, 5: 1 - 1e-6}], 6, 9)
    many = Distribution(mx.broadcast_to(one.probs, (rows, 6)), mx.broadcast_to(one.ids, (rows, 6)), 9)
    drawn = many.draw(keys([Stream(seed).next() for seed in range(rows)]))
    assert set(drawn.tolist()) <= {3, 5}


def test_a_key_gives_the_same_numbers_alone_and_beside_others():
    seeds = [Stream(seed).next() for seed in (1, 2, 3)]
    for numbers in (gumbel, uniform):
        together = np.array(numbers(keys(seeds), 33))
        for i, seed in enumerate(seeds):
            assert np.array_equal(together[i : i + 1], np.array(numbers(keys([seed]), 33)))
    assert np.array_equal(np.array(keys(seeds))[1], np.array(mx.random.key(seeds[1])))


def test_accepting_has_the_frequency_of_its_probability_and_is_sure_at_the_ends():
    made = Sampler(8, 16)
    made.add(0, SamplingOptions(seed=1), [])
    chance = mx.array([0.0, 0.25, 1.0, 7.0])
    hits = np.array([np.array(made.accept(0, chance)) for _ in range(4000)]).mean(0)
    assert (hits[0], hits[2], hits[3]) == (0.0, 1.0, 1.0)
    assert abs(hits[1] - 0.25) < 5 * np.sqrt(0.25 * 0.75 / 4000)


def test_draws_acceptances_and_samples_share_one_count_of_a_rows_random_numbers():
    def run(speculating: bool) -> list[int]:
        made = Sampler(8, 16)
        made.add(0, SamplingOptions(seed=5, temperature=1.0, top_k=0, top_p=1.0), [])
        logits = mx.array(LOGITS)[None]
        tokens = []
        for _ in range(12):
            source = made.distribution(0, logits)
            tokens += made.draw(0, source).tolist() if speculating else made.sample([0], logits).read_tokens()
        return tokens

    assert run(speculating=True) == run(speculating=False)
