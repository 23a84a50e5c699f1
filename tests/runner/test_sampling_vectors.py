"""Known inputs and the token that each must give."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest

from arriero.errors import InvalidRequest
from arriero.runner.messages import SamplingOptions
from arriero.runner.sampling import Sampler
from arriero.runner.sampling.randomness import mix

PLAIN = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "repeat_last_n": 64}


def options(**changed) -> SamplingOptions:
    return SamplingOptions(**{**PLAIN, **changed})


def sampler(prior, vocab=5, context=128, **changed) -> Sampler:
    made = Sampler(vocab, context)
    made.add("row", options(**changed), prior)
    return made


def token(made: Sampler, logits) -> int:
    return made.sample(["row"], mx.array([logits], mx.float32)).read_tokens()[0]


@pytest.mark.parametrize(
    ("changed", "prior", "logits", "expected"),
    [
        ({}, [], [0, 5, 4], 1),
        ({"presence_penalty": 6, "repeat_last_n": 1}, [1], [0, 5, 4], 2),
        ({"repeat_penalty": 2, "repeat_last_n": 1}, [1], [0, 5, 4], 2),
        ({"repeat_penalty": 4, "repeat_last_n": 1}, [1], [-5, -1, -3], 2),
        ({"frequency_penalty": 2, "repeat_last_n": 4}, [1, 1], [0, 5, 4], 2),
        ({"repeat_penalty": 2, "presence_penalty": 10, "repeat_last_n": 0}, [1], [0, 5, 4], 1),
        ({"presence_penalty": 6, "repeat_last_n": -1}, [1], [0, 5, 4], 2),
        ({"presence_penalty": 6, "repeat_last_n": -1}, [1] + [0] * 127, [0, 5, 4], 2),
        ({"presence_penalty": 6, "repeat_last_n": -1}, [1] + [0] * 128, [0, 5, 4], 1),
        ({"repeat_penalty": 0, "repeat_last_n": 1}, [1], [0, 5, 4], 1),
        ({"frequency_penalty": 2}, [], [0, 5, 4], 1),
        ({"presence_penalty": 6}, [], [5, 4, 0], 0),
        ({"temperature": 1, "top_k": 1}, [], [1, 5, 4], 1),
        ({"temperature": 1, "top_p": 0.4}, [], np.log([0.5, 0.3, 0.2]), 0),
        ({"temperature": 1, "min_p": 0.7}, [], np.log([0.5, 0.3, 0.2]), 0),
        ({"temperature": 1e-20}, [], [1, 5, 4], 1),
        ({"temperature": 1e-44}, [], [1, 5, 4], 1),
        ({"temperature": -1}, [], [1, 5, 4], 1),
    ],
)
def test_the_known_vectors(changed, prior, logits, expected):
    assert token(sampler(prior, vocab=3, **changed), list(map(float, logits))) == expected


def test_a_score_that_is_no_number_is_never_the_greatest():
    made, logits = sampler([], vocab=3), [math.nan, 1.0, 2.0]
    assert token(made, logits) == 2
    assert made.distribution("row", mx.array([logits])).draw(mx.zeros((1, 2), mx.uint32)).item() == 2


def test_tokens_out_of_the_window_are_penalised_no_more():
    made = sampler([1, 2, 3], vocab=4, presence_penalty=10, repeat_last_n=2)
    assert token(made, [0, 9, 8, 7]) == 1
    assert token(made, [0, 8, 9, 7]) == 2
    assert token(made, [0, 9, 8.5, 7]) == 3


def test_a_token_that_was_drawn_counts_in_the_next_draw():
    made = sampler([], vocab=3, presence_penalty=2, repeat_last_n=8)
    assert [token(made, [0, 2, 1.5]) for _ in range(4)] == [1, 2, 0, 1]


def test_repeat_and_presence_apply_once_and_frequency_for_each_occurrence():
    made = sampler([1, 1, 1, 2], vocab=4, repeat_penalty=2, presence_penalty=0.25, frequency_penalty=0.5)
    scores = made.distribution("row", mx.array([[1.0, 8.0, -3.0, 2.0]]))
    assert scores.ids.tolist() == [[1]]
    wanted = [1.0, 8.0 / 2 - 0.25 - 1.5, -3.0 * 2 - 0.25 - 0.5, 2.0]
    warm = sampler([1, 1, 1, 2], vocab=4, repeat_penalty=2, presence_penalty=0.25, frequency_penalty=0.5, temperature=1)
    probs = np.array(warm.distribution("row", mx.array([[1.0, 8.0, -3.0, 2.0]])).probs)[0]
    assert np.allclose(probs, np.exp(wanted) / np.exp(wanted).sum(), rtol=1e-6)


def test_tokens_outside_the_vocabulary_in_a_prompt_penalise_nothing():
    made = sampler([7, -3, 2**31 - 1, 1], vocab=3, presence_penalty=6, frequency_penalty=1)
    assert token(made, [0, 5, 4]) == 2
    alone = sampler([7, 9], vocab=3, presence_penalty=6, repeat_penalty=3)
    assert token(alone, [0, 5, 4]) == 1


def test_top_p_acts_on_what_top_k_left_renormalised():
    made = sampler([], temperature=1, top_k=2, top_p=0.7)
    found = made.distribution("row", mx.array(np.log([[0.6, 0.2, 0.2]]).astype(np.float32)))
    assert found.ids.tolist() == [[0, 1]]
    assert found.probs.tolist() == [[1.0, 0.0]]


def test_top_p_acts_after_the_temperature():
    logits = mx.array(np.log([[0.5, 0.3, 0.2]]).astype(np.float32))
    cold = sampler([], temperature=0.5, top_p=0.6).distribution("row", logits)
    assert np.array_equal(np.array(cold.probs)[0] > 0, [True, False, False])
    warm = sampler([], temperature=2, top_p=0.6).distribution("row", logits)
    assert np.array_equal(np.array(warm.probs)[0] > 0, [True, True, False])


def test_min_p_is_relative_to_the_likeliest_token():
    made = sampler([], temperature=1, min_p=0.5)
    found = made.distribution("row", mx.array(np.log([[0.4, 0.25, 0.19, 0.16]]).astype(np.float32)))
    assert np.allclose(np.array(found.probs)[0], np.array([0.4, 0.25, 0, 0]) / 0.65, atol=1e-6)


def test_typical_p_keeps_the_tokens_whose_surprise_is_nearest_the_entropy():
    probs = np.array([0.5, 0.2, 0.15, 0.1, 0.05])
    entropy = -(probs * np.log(probs)).sum()
    order = np.argsort(np.abs(-np.log(probs) - entropy), kind="stable")
    before = np.cumsum(probs[order]) - probs[order]
    kept = np.zeros(5)
    kept[order[before < 0.3]] = probs[order[before < 0.3]]
    assert kept[0] == 0, "the likeliest token is not typical here"
    logits = mx.array(np.log(probs)[None].astype(np.float32))
    for top_k in (0, 5):
        found = sampler([], vocab=6, temperature=1, typical_p=0.3, top_k=top_k).distribution("row", logits).dense()
        assert np.allclose(np.array(found.probs)[0, :5], kept / kept.sum(), atol=1e-6)


@pytest.mark.parametrize(("prior", "window"), [([1, 2], 2), ([2], 2), ([9, 1, 2], 2)])
def test_each_row_over_a_chain_of_drafts_sees_the_drafts_before_it(prior, window):
    made = sampler(prior, repeat_penalty=10, repeat_last_n=window)
    logits = mx.array([[0, 9, 9, 8, 0], [0, 0, 9, 9, 8], [0, 0, 9, 9, 8]], mx.float32)
    if prior == [2]:
        logits = logits - mx.array([[0, 9, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]], mx.float32)
    chain = mx.array([3, 4], mx.int32)
    before = np.array(made._history.state()[0])
    assert made.distribution("row", logits, chain).ids[:, 0].tolist() == [3, 4, 2]
    assert np.array_equal(np.array(made._history.state()[0]), before)
    assert made.distribution("row", logits[1:], chain).ids[:, 0].tolist() == [4, 2]


def test_a_chain_equals_committing_its_drafts_one_by_one():
    for window in (1, 2, 3, 8):
        for prior in ([], [0], [0, 1, 2, 3, 4]):
            chained = sampler(prior, vocab=9, temperature=1, frequency_penalty=1, repeat_last_n=window)
            serial = sampler(prior, vocab=9, temperature=1, frequency_penalty=1, repeat_last_n=window)
            chained.add("wider", options(repeat_penalty=2.0, repeat_last_n=11), [3, 3, 3])
            logits = mx.random.normal((5, 9), key=mx.random.key(window))
            drafts = mx.array([5, 1, 5, 7], mx.int32)
            together = np.array(chained.distribution("row", logits, drafts).probs)
            for i in range(5):
                alone = serial.distribution("row", logits[i : i + 1]).probs
                assert np.array_equal(together[i], np.array(alone)[0])
                if i < 4:
                    serial.commit("row", drafts[i : i + 1])
            chained.commit("row", drafts)
            after = [np.array(made.distribution("row", logits).probs) for made in (chained, serial)]
            assert np.array_equal(*after)


def test_more_rows_than_a_chain_has_places_are_refused_and_any_number_without_a_chain_is_not():
    for changed in ({}, {"repeat_penalty": 2.0}):
        made = sampler([1], **changed)
        assert made.distribution("row", mx.zeros((9, 5))).rows == 9
        with pytest.raises(ValueError, match="chain of 2 drafts"):
            made.distribution("row", mx.zeros((4, 5)), mx.array([1, 2], mx.int32))


def test_mix_is_the_first_outputs_of_splitmix64():
    assert mix(0, 0) == 0xE220A8397B1DCDAF
    assert mix(0, 1) == 0x6E789E6AA1B965F4
    assert mix(2**64 - 1, 2**40) < 2**64


@pytest.mark.parametrize("name", ["temperature", "top_p", "repeat_penalty", "frequency_penalty"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_option_that_is_no_finite_number_is_refused_by_name(name, value):
    with pytest.raises(InvalidRequest, match=name):
        Sampler(5, 10).add("row", options(**{name: value}), [])
