"""In float32 drafting changes no token: every reply is the plain loop's, whatever is drafted and whatever stays."""

from __future__ import annotations

import random
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from arriero.runner.messages import Finished, SamplingOptions
from tests.helpers.engine_runs import GREEDY, collect, make_engine, plain_loop, run, submit
from tests.helpers.speculation import PATTERNS, speculating
from tests.helpers.tiny_model import VOCAB, TinyModel

CONTEXT = 2048
SAMPLINGS = {
    "greedy": GREEDY,
    "penalties": SamplingOptions(
        temperature=0.0, repeat_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, repeat_last_n=20
    ),
    "seeded": SamplingOptions(temperature=0.9, top_k=20, top_p=0.95, min_p=0.01, repeat_penalty=1.1, seed=1234),
    "seeded, whole vocabulary": SamplingOptions(temperature=1.3, top_k=0, top_p=1.0, typical_p=0.9, seed=5),
}


@cache
def model(layers: str = "fs") -> TinyModel:
    return TinyModel(layers=layers, window=24, context=CONTEXT, seed=7)


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


@cache
def expected(seed: int, length: int, count: int, sampling: SamplingOptions = GREEDY, layers: str = "fs") -> list[int]:
    return plain_loop(model(layers), prompt(seed, length), count, sampling)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("widths", [(1,), (8,), (1, 2, 3, 4, 5, 6, 7, 8, 0)], ids=str)
def test_long_replies_are_the_plain_loops_whatever_stays(widths, pattern, sampling):
    """S08."""
    count = 500 if len(widths) > 1 or pattern == "random" else 120
    wanted = expected(1, 40, 500, sampling)[:count]
    replies = {tuple(prompt(1, 40)): wanted}
    engine = speculating(model(), replies=replies, pattern=PATTERNS[pattern], widths=widths)
    engine.submit(submit("a", prompt(1, 40), count, sampling=sampling))
    reply = run(engine)["a"]
    assert reply.tokens == wanted
    used = reply.end.speculation
    assert used.rounds > 0
    assert (used.accepted == used.drafted) is (pattern == "always")
    assert (used.accepted == 0) is (pattern == "never")
    assert used.rounds + used.accepted + used.plain_steps == count


@pytest.mark.parametrize("layers", ["ff", "ss"])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("length", [1, 22, 23, 24, 25, 26, 48])
def test_prompts_around_the_windows_length_make_no_difference(length, ahead, layers):
    wanted = expected(2, length, 80, layers=layers)
    engine = speculating(
        model(layers),
        replies={tuple(prompt(2, length)): wanted},
        pattern=PATTERNS["random"],
        widths=(5, 0, 2),
        ahead=ahead,
    )
    engine.submit(submit("a", prompt(2, length), 80))
    assert run(engine)["a"].tokens == wanted


@pytest.mark.parametrize("pattern", ["always", "alternating"])
@pytest.mark.parametrize("at", range(20, 29))
def test_a_stop_token_within_a_round_ends_the_reply_there(at, pattern):
    tokens = expected(3, 30, 60)
    stop = tokens[at]
    first = tokens.index(stop)
    engine = speculating(
        model(), replies={tuple(prompt(3, 30)): tokens}, pattern=PATTERNS[pattern], widths=(8,), prefix_bytes=1 << 24
    )
    engine.submit(submit("a", prompt(3, 30), 60, stop=[stop]))
    reply = run(engine)["a"]
    assert reply.tokens == tokens[:first]
    assert reply.reason == "stop"
    # What stood behind it was said by nobody: the next turn goes on without it.
    turn = [*prompt(3, 30), *tokens[:first], 1, 2, 3]
    engine.submit(submit("b", turn, 20))
    later = run(engine)["b"]
    assert later.tokens == plain_loop(model(), turn, 20)
    assert later.end.cached_tokens == 30 + first


@pytest.mark.parametrize("count", range(1, 12))
def test_no_round_gives_more_tokens_than_are_left(count):
    tokens = expected(3, 30, 60)
    engine = speculating(model(), replies={tuple(prompt(3, 30)): tokens}, widths=(8,))
    engine.submit(submit("a", prompt(3, 30), count))
    reply = run(engine)["a"]
    assert reply.tokens == tokens[:count]
    assert reply.reason == "length"
    assert reply.end.generated_tokens == count


def test_a_row_that_fills_its_context_to_the_end_is_not_overrun():
    tokens = expected(4, 40, 60)
    engine = speculating(model(), replies={tuple(prompt(4, 40)): tokens}, widths=(8,), context_length=100)
    engine.submit(submit("a", prompt(4, 40), 0))
    reply = run(engine)["a"]
    assert reply.tokens == tokens
    assert reply.reason == "length"


others = st.lists(
    st.fixed_dictionaries(
        {
            "step": st.integers(0, 80),
            "length": st.integers(1, 60),
            "count": st.integers(1, 60),
            "seed": st.integers(0, 3),
            "cancel": st.none() | st.integers(0, 40),
            "sampling": st.sampled_from(["greedy", "seeded"]),
        }
    ),
    max_size=5,
)


@pytest.mark.parametrize("sampling", ["greedy", "penalties", "seeded"])
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    others=others,
    pattern=st.sampled_from(sorted(PATTERNS)),
    widths=st.lists(st.integers(0, 8), min_size=1, max_size=4),
    ahead=st.booleans(),
    prefix_bytes=st.sampled_from([0, 1 << 24]),
)
def test_rows_that_join_leave_and_are_cancelled_change_no_token(sampling, others, pattern, widths, ahead, prefix_bytes):
    """S09: with several rows nobody drafts, alone they do, and nobody's tokens change."""
    rows = {"main": (9, 40, 120, sampling)}
    rows |= {f"other{i}": (o["seed"], o["length"], o["count"], o["sampling"]) for i, o in enumerate(others)}
    wanted = {name: expected(seed, n, count, SAMPLINGS[how]) for name, (seed, n, count, how) in rows.items()}
    replies = {tuple(prompt(seed, n)): wanted[name] for name, (seed, n, _, _) in rows.items()}
    engine = speculating(
        model(), replies=replies, pattern=PATTERNS[pattern], widths=widths, ahead=ahead, prefix_bytes=prefix_bytes
    )
    engine.submit(submit("main", prompt(9, 40), 120, sampling=SAMPLINGS[sampling]))
    found, step = {}, 0
    while engine.busy or any(o["step"] >= step for o in others):
        for i, o in enumerate(others):
            if o["step"] == step:
                chosen = SAMPLINGS[o["sampling"]]
                engine.submit(submit(f"other{i}", prompt(o["seed"], o["length"]), o["count"], sampling=chosen))
            if o["cancel"] is not None and o["step"] + o["cancel"] == step:
                engine.cancel(f"other{i}")
        engine.step()
        collect(engine, found)
        step += 1
    for name, reply in found.items():
        assert reply.tokens == wanted[name][: len(reply.tokens)]
        assert isinstance(reply.end, Finished)
        assert reply.reason == "cancelled" or len(reply.tokens) == len(wanted[name])


def test_nothing_is_drafted_while_several_rows_run_and_drafting_goes_on_after():
    wanted = expected(9, 40, 120)
    engine = speculating(model(), replies={tuple(prompt(9, 40)): wanted}, widths=(3,))
    engine.submit(submit("main", prompt(9, 40), 120))
    engine.submit(submit("beside", prompt(1, 40), 30))
    replies = {}
    while "beside" not in replies or replies["beside"].end is None:
        engine.step()
        collect(engine, replies)
        assert engine.counts().draft_rounds == 0
    assert len(replies["main"].tokens) < 60
    run(engine, replies)
    assert replies["main"].tokens == wanted
    assert replies["main"].end.speculation.rounds > 15


@pytest.mark.parametrize("depth", [1, 17, 36, 39, 40, 55])
def test_a_prefix_restored_at_any_depth_changes_no_token(depth):
    first = prompt(5, 60)
    second = first[:depth] + prompt(6, 70 - depth)
    wanted = plain_loop(model(), second, 60)
    engine = speculating(
        model(), replies={tuple(second): wanted}, pattern=PATTERNS["random"], widths=(4, 7), prefix_bytes=1 << 24
    )
    engine.submit(submit("a", first, 30))
    run(engine)
    engine.submit(submit("b", second, 60))
    reply = run(engine)["b"]
    assert reply.tokens == wanted
    assert reply.end.speculation.rounds > 0


def test_log_probabilities_are_those_of_the_plain_run():
    asking = SamplingOptions(temperature=0.0, repeat_penalty=1.2, logprobs=True, top_logprobs=3)
    plain = make_engine(model())
    plain.submit(submit("a", prompt(5, 30), 60, sampling=asking))
    wanted = run(plain)["a"]
    engine = speculating(
        model(), replies={tuple(prompt(5, 30)): wanted.tokens}, pattern=PATTERNS["random"], widths=(6,)
    )
    engine.submit(submit("a", prompt(5, 30), 60, sampling=asking))
    found = run(engine)["a"]
    assert found.tokens == wanted.tokens
    assert found.end.speculation.accepted > 10
    assert [each.logprob for each in found.logprobs] == pytest.approx([each.logprob for each in wanted.logprobs])
    assert [[t for t, _ in each.top] for each in found.logprobs] == [[t for t, _ in e.top] for e in wanted.logprobs]
