"""Rows are sampled together and yet each on its own."""

from __future__ import annotations

import time
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from arriero.runner.messages import SamplingOptions, TokenLogprob
from arriero.runner.sampling import Sampler

VOCAB = 97
MANY = {
    "greedy": SamplingOptions(temperature=0.0),
    "default": SamplingOptions(seed=1),
    "default again": SamplingOptions(seed=1),
    "other seed": SamplingOptions(seed=2),
    "dense": SamplingOptions(seed=3, top_k=0, top_p=1.0),
    "nucleus": SamplingOptions(seed=4, top_k=0, top_p=0.7, min_p=0.01),
    "typical": SamplingOptions(seed=5, typical_p=0.6),
    "penalties": SamplingOptions(seed=6, repeat_penalty=1.3, repeat_last_n=5),
    "wide penalties": SamplingOptions(seed=7, presence_penalty=0.5, frequency_penalty=0.3, repeat_last_n=-1),
    "greedy penalties": SamplingOptions(temperature=0.0, repeat_penalty=1.5),
    "hot": SamplingOptions(seed=8, temperature=3.0, top_k=3),
}


def logits_of(name: str, step: int) -> mx.array:
    seed = 1000 * step + sum(map(ord, name.removesuffix(" again")))
    return 4 * mx.random.normal((1, VOCAB), key=mx.random.key(seed))


def alone(name: str, steps: int) -> list[int]:
    made = Sampler(VOCAB, 32)
    made.add(name, MANY[name], [1, 2, 3])
    return [made.sample([name], logits_of(name, step)).read_tokens()[0] for step in range(steps)]


def test_the_same_seed_gives_the_same_tokens_alone_and_among_others_that_come_and_go():
    steps = 24
    wanted = {name: alone(name, steps) for name in MANY}
    made = Sampler(VOCAB, 32)
    names = list(MANY)
    got: dict[str, list[int]] = {name: [] for name in names}
    starts = {name: 2 * i for i, name in enumerate(names)}
    for step in range(steps + 2 * len(names)):
        rows = []
        for name in names:
            if step == starts[name]:
                made.add(name, MANY[name], [1, 2, 3])
            if starts[name] <= step < starts[name] + steps:
                rows.append(name)
            elif step == starts[name] + steps:
                made.remove(name)
        rows = rows[step % max(len(rows), 1) :] + rows[: step % max(len(rows), 1)]
        if not rows:
            continue
        logits = mx.concatenate([logits_of(name, step - starts[name]) for name in rows])
        for name, token in zip(rows, made.sample(rows, logits).read_tokens(), strict=True):
            got[name].append(token)
    assert got == wanted
    assert got["default"] == got["default again"]


def test_tokens_may_stay_lazy_for_many_steps():
    def tokens(read: bool) -> list[list[int]]:
        made = Sampler(VOCAB, 32)
        rows = ["penalties", "wide penalties", "greedy"]
        for row in rows:
            made.add(row, MANY[row], [5, 5])
        table = mx.random.normal((VOCAB, VOCAB), key=mx.random.key(0))
        latest, kept = mx.zeros(3, mx.int32), []
        for _ in range(30):
            latest = made.sample(rows, table[latest]).tokens
            if read:
                mx.eval(latest)
            kept.append(latest)
        return mx.stack(kept).tolist()

    assert tokens(read=False) == tokens(read=True)


def test_flat_logits_give_the_same_draws_for_a_seed_and_others_for_another():
    def draws(seed: int) -> list[int]:
        made = Sampler(4, 100)
        made.add(0, SamplingOptions(temperature=1.0, seed=seed, top_k=0, top_p=1.0), [])
        return [made.sample([0], mx.zeros((1, 4))).read_tokens()[0] for _ in range(32)]

    assert draws(1234) == draws(1234)
    assert draws(1234) != draws(5678)


def test_rows_without_a_seed_draw_differently():
    made = Sampler(1000, 100)
    rows = list(range(6))
    for row in rows:
        made.add(row, SamplingOptions(temperature=1.0, top_k=0, top_p=1.0), [])
    draws = np.array([made.sample(rows, mx.zeros((6, 1000))).read_tokens() for _ in range(8)])
    assert len({tuple(column) for column in draws.T}) == 6


def test_a_draw_is_the_categorical_of_its_own_key():
    from arriero.runner.sampling.randomness import mix

    made = Sampler(50, 100)
    made.add(0, SamplingOptions(temperature=1.0, seed=42, top_k=0, top_p=1.0), [])
    logits = mx.random.normal((1, 50), key=mx.random.key(9))
    for counter in range(5):
        wanted = mx.random.categorical(mx.log(mx.softmax(logits[0])), key=mx.random.key(mix(42, counter)))
        assert made.sample([0], logits).read_tokens() == [wanted.item()]


def test_decode_steps_change_no_shape_of_the_history():
    made = Sampler(VOCAB, 32)
    made.add("a", MANY["penalties"], [1])
    made.add("b", MANY["wide penalties"], list(range(40)))
    shapes = set()
    for step in range(40):
        made.sample(["a", "b"], mx.concatenate([logits_of("a", step), logits_of("b", step)]))
        shapes.add(made._history.state()[0].shape)
    assert shapes == {(2, 32)}


def test_the_history_is_dropped_with_the_last_row_and_its_lines_are_used_again():
    made = Sampler(VOCAB, 32)
    for turn in range(5):
        made.add(turn, MANY["penalties"], [1, 2])
        made.add((turn, "more"), MANY["wide penalties"], [3])
        made.remove(turn)
        made.add(turn, MANY["penalties"], [4])
        assert made._history.state()[0].shape == (2, 32)
        made.remove(turn)
        made.remove((turn, "more"))
        made.remove("never here")
        assert made._history.state() == []


def test_log_probabilities_are_of_raw_logits_and_only_for_rows_that_asked():
    made = Sampler(VOCAB, 32)
    asked = SamplingOptions(seed=3, temperature=0.3, logprobs=True, top_logprobs=3, repeat_penalty=4.0)
    made.add("plain", SamplingOptions(seed=1, top_logprobs=5), [1])
    made.add("asked", asked, [1, 2, 3])
    made.add("chosen only", SamplingOptions(temperature=0.0, logprobs=True), [1])
    logits = mx.concatenate([logits_of("a", step) for step in range(3)])
    sampled = made.sample(["plain", "asked", "chosen only"], logits)
    raw = np.array(logits, np.float64)
    wanted = raw - np.log(np.exp(raw).sum(-1, keepdims=True))
    none, full, bare = sampled.read_logprobs()
    tokens = sampled.read_tokens()
    assert none is None
    order = np.argsort(-raw[1], kind="stable")[:3]
    assert full.logprob == pytest.approx(wanted[1, tokens[1]], abs=1e-5)
    assert [token for token, _ in full.top] == order.tolist()
    assert [value for _, value in full.top] == pytest.approx(wanted[1, order].tolist(), abs=1e-5)
    assert bare == TokenLogprob(pytest.approx(wanted[2, tokens[2]], abs=1e-5), [])
    assert len(sampled.arrays()) == 4


def test_log_probabilities_cost_nothing_when_nobody_asked():
    made = Sampler(VOCAB, 32)
    made.add(0, SamplingOptions(), [])
    sampled = made.sample([0], mx.zeros((1, VOCAB)))
    assert sampled.read_logprobs() is None
    assert len(sampled.arrays()) == 1


def test_more_alternatives_than_tokens_and_impossible_tokens_are_left_out():
    made = Sampler(3, 32)
    made.add(0, SamplingOptions(temperature=0.0, logprobs=True, top_logprobs=20), [])
    (entry,) = made.sample([0], mx.array([[1.0, -float("inf"), 2.0]])).read_logprobs()
    assert [token for token, _ in entry.top] == [2, 0]


def test_logits_in_sixteen_bits_are_sampled_in_float32():
    made = Sampler(3, 32)
    made.add(0, SamplingOptions(temperature=1.0, top_k=0, top_p=1.0, logprobs=True), [])
    logits = mx.array([[1.0, 2.0, 3.0]], mx.bfloat16)
    assert made.distribution(0, logits).probs.dtype == mx.float32
    sampled = made.sample([0], logits)
    assert sampled.tokens.dtype == mx.int32
    assert sampled.logprobs.chosen.dtype == mx.float32


def test_a_row_added_twice_sampled_twice_or_never_added_is_refused():
    made = Sampler(3, 32)
    made.add("a", SamplingOptions(), [])
    with pytest.raises(ValueError, match="already"):
        made.add("a", SamplingOptions(), [])
    with pytest.raises(ValueError, match="once a step"):
        made.sample(["a", "a"], mx.zeros((2, 3)))
    with pytest.raises(ValueError, match="'b' was not added"):
        made.sample(["b"], mx.zeros((1, 3)))
    with pytest.raises(ValueError, match="2 rows of logits for 1"):
        made.sample(["a"], mx.zeros((2, 3)))


def test_a_row_added_again_starts_its_draws_and_its_history_anew():
    made = Sampler(VOCAB, 32)
    runs = []
    for _ in range(2):
        made.add("penalties", MANY["penalties"], [1, 2, 3])
        runs.append([made.sample(["penalties"], logits_of("penalties", s)).read_tokens()[0] for s in range(10)])
        made.remove("penalties")
    assert runs[0] == runs[1] == alone("penalties", 10)


def test_sampling_never_waits_for_the_device():
    made = Sampler(VOCAB, 32)
    rows = list(MANY)
    for row in rows:
        made.add(row, MANY[row], [1])
    heavy = mx.random.normal((VOCAB, VOCAB))
    for _ in range(400):
        heavy = mx.softmax(heavy @ heavy)
    logits = heavy[: len(rows), :VOCAB]
    started = time.perf_counter()
    tokens = made.sample(rows, logits).tokens
    built = time.perf_counter() - started
    mx.eval(tokens)
    total = time.perf_counter() - started
    assert built < total / 2


@pytest.mark.parametrize(
    ("options", "largest"),
    [
        ([{"temperature": 0.0}], True),
        ([{"temperature": 0.0}, {"temperature": 0.0, "seed": 3}], True),
        ([{"temperature": 0.0}, {}], False),
        ([{"temperature": 0.0, "repeat_penalty": 1.2}], False),
        ([{"temperature": 0.0, "logprobs": True}], False),
    ],
)
def test_it_says_where_the_largest_logits_are_all_that_is_wanted(options: list[dict[str, Any]], largest: bool) -> None:
    sampler = Sampler(50, 100)
    for row, how in enumerate(options):
        sampler.add(row, SamplingOptions(**how), [1])
    assert sampler.largest(range(len(options))) is largest
