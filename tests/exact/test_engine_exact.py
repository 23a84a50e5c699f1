"""In float32 the engine gives the tokens of the plain loop, whatever chunks, neighbours and cancels there are."""

from __future__ import annotations

import random
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from arriero.runner.messages import SamplingOptions
from tests.helpers.engine_runs import GREEDY, collect, make_engine, plain_loop, run, submit
from tests.helpers.tiny_model import VOCAB, TinyModel

LAYERS = ["ff", "ss", "fs"]
CONTEXT = 2048
SEEDED = SamplingOptions(temperature=0.9, top_k=20, top_p=0.95, repeat_penalty=1.1, seed=1234)


@cache
def model(layers: str) -> TinyModel:
    return TinyModel(layers=layers, window=24, context=CONTEXT, seed=len(layers) + ord(layers[0]))


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


@cache
def expected(layers: str, seed: int, length: int, count: int, sampling: SamplingOptions = GREEDY) -> list[int]:
    return plain_loop(model(layers), prompt(seed, length), count, sampling)


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("chunk", [1, 7, 512, CONTEXT])
def test_any_prefill_chunk_gives_the_plain_loops_tokens(layers, sampling, chunk):
    length = 60 if chunk == 1 else 530
    engine = make_engine(model(layers), prefill_chunk=chunk)
    engine.submit(submit("a", prompt(1, length), 200, sampling=sampling))
    assert run(engine)["a"].tokens == expected(layers, 1, length, 200, sampling)


arrivals = st.lists(
    st.fixed_dictionaries(
        {
            "step": st.integers(0, 150),
            "length": st.integers(1, 70),
            "count": st.integers(1, 120),
            "seed": st.integers(0, 3),
            "cancel": st.none() | st.integers(0, 60),
            "sampled": st.booleans(),
        }
    ),
    min_size=1,
    max_size=7,
)


@pytest.mark.parametrize("layers", LAYERS)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    chunk=st.sampled_from([1, 7, 512]),
    others=arrivals,
    sampling=st.sampled_from([GREEDY, SEEDED]),
    ahead=st.booleans(),
)
def test_rows_that_join_leave_and_are_cancelled_change_no_token_of_a_row(layers, chunk, others, sampling, ahead):
    engine = make_engine(model(layers), ahead, prefill_chunk=chunk)
    engine.submit(submit("main", prompt(9, 40), 200, sampling=sampling))
    replies, step = {}, 0
    while engine.busy or any(other["step"] >= step for other in others):
        for i, other in enumerate(others):
            if other["step"] == step:
                chosen = SEEDED if other["sampled"] else GREEDY
                tokens = prompt(other["seed"], other["length"])
                engine.submit(submit(f"other{i}", tokens, other["count"], sampling=chosen))
            if other["cancel"] is not None and other["step"] + other["cancel"] == step:
                engine.cancel(f"other{i}")
        engine.step()
        collect(engine, replies)
        step += 1
    assert replies["main"].tokens == expected(layers, 9, 40, 200, sampling)
    for i, other in enumerate(others):
        reply = replies[f"other{i}"]
        chosen = SEEDED if other["sampled"] else GREEDY
        alone = expected(layers, other["seed"], other["length"], other["count"], chosen)
        assert reply.tokens == alone[: len(reply.tokens)]
        assert reply.reason == "cancelled" or len(reply.tokens) == other["count"]


@pytest.mark.parametrize("layers", LAYERS)
def test_24_prompts_at_once_in_any_order_give_the_tokens_of_each_alone(layers):
    """S01: no answer of another prompt's, whatever the order and however the batch grows and shrinks."""
    lengths = {seed: 1 + seed * 37 % 50 for seed in range(24)}
    counts = {seed: 8 + seed * 5 % 23 for seed in range(24)}
    order = list(range(24))
    for shuffle in range(4):
        random.Random(shuffle).shuffle(order)
        engine = make_engine(model(layers), ahead=shuffle % 2 == 0, prefill_chunk=16, max_rows=5 + 6 * shuffle)
        for seed in order:
            engine.submit(submit(str(seed), prompt(seed, lengths[seed]), counts[seed]))
        replies = run(engine)
        for seed in order:
            assert replies[str(seed)].tokens == expected(layers, seed, lengths[seed], counts[seed])


def test_logprobs_do_not_depend_on_neighbours_beyond_rounding():
    asking = SamplingOptions(temperature=0.0, logprobs=True, top_logprobs=2)
    runs = []
    for neighbours in (0, 3):
        engine = make_engine(model("fs"), prefill_chunk=7)
        engine.submit(submit("a", prompt(5, 30), 40, sampling=asking))
        for i in range(neighbours):
            engine.submit(submit(f"n{i}", prompt(i, 10 + i), 25))
        runs.append([logprob.logprob for logprob in run(engine)["a"].logprobs])
    assert runs[0] == pytest.approx(runs[1], abs=1e-4)
    assert len(runs[0]) == 40
