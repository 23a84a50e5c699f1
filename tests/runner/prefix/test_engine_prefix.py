"""What the engine makes of stored prefixes: shared, kept after a cancel, dropped under pressure, not a failed row's."""

from __future__ import annotations

import random

import mlx.core as mx
import pytest

from arriero.model.contract import Batch, Span
from arriero.runner.messages import Failed
from arriero.runner.prefix.keys import row_keys
from arriero.runner.prefix.store import PrefixStore
from tests.helpers.engine_runs import collect, make_engine, plain_loop, run, submit
from tests.helpers.tiny_model import VOCAB, TinyModel

PLENTY = 1 << 30


def tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(count)]


@pytest.fixture(params=["ff", "fs"])
def model(request: pytest.FixtureRequest) -> TinyModel:
    return TinyModel(request.param, context=2048)


def evaluated(engine) -> int:
    return engine.counts().tokens_prefilled


def test_two_requests_with_one_new_prefix_read_it_once(model):
    engine = make_engine(model, prefill_chunk=50, prefix_bytes=PLENTY)
    shared = tokens(1, 400)
    first, second = [*shared, *tokens(2, 30)], [*shared, *tokens(3, 30)]
    engine.submit(submit("a", first, 5))
    engine.step()
    engine.submit(submit("b", second, 5))
    replies = run(engine)
    assert replies["a"].tokens == plain_loop(model, first, 5)
    assert replies["b"].tokens == plain_loop(model, second, 5)
    assert replies["b"].end.cached_tokens == 400
    assert evaluated(engine) == 429 + 29


def test_requests_that_come_at_once_with_one_prefix_read_it_once(model):
    engine = make_engine(model, prefill_chunk=50, prefix_bytes=PLENTY)
    prompts = [[*tokens(1, 300), *tokens(seed, 20)] for seed in range(2, 6)]
    for i, prompt in enumerate(prompts):
        engine.submit(submit(str(i), prompt, 5))
    replies = run(engine)
    assert [replies[str(i)].end.cached_tokens for i in range(4)] == [0, 300, 300, 300]
    assert all(replies[str(i)].tokens == plain_loop(model, prompt, 5) for i, prompt in enumerate(prompts))


def test_a_row_that_waits_for_another_lets_those_behind_it_pass(model):
    engine = make_engine(model, prefill_chunk=20, prefix_bytes=PLENTY)
    engine.submit(submit("a", tokens(1, 1000), 2))
    engine.step()
    engine.submit(submit("same", tokens(1, 1000), 2))
    engine.submit(submit("other", tokens(9, 10), 2))
    replies: dict = {}
    while "other" not in replies or replies["other"].end is None:
        engine.step()
        collect(engine, replies)
    assert replies["a"].end is None
    run(engine, replies)
    assert replies["same"].end.cached_tokens >= 990


def test_a_row_whose_leader_is_cancelled_goes_on_from_what_that_one_read(model):
    engine = make_engine(model, prefill_chunk=50, prefix_bytes=PLENTY)
    prompt = tokens(1, 600)
    engine.submit(submit("a", prompt, 5))
    engine.step()
    engine.submit(submit("b", prompt, 5))
    for _ in range(4):
        engine.step()
    engine.cancel("a")
    reply = run(engine)["b"]
    assert reply.tokens == plain_loop(model, prompt, 5)
    assert 200 <= reply.end.cached_tokens <= 300


def test_a_cancelled_prefill_is_kept_and_retries_make_progress(model):
    """R-45: each try goes on where the last one was cut off."""
    engine = make_engine(model, prefill_chunk=50, prefix_bytes=PLENTY)
    prompt = tokens(1, 500)
    reached = []
    for attempt in range(4):
        engine.submit(submit(str(attempt), prompt, 5))
        engine.step()
        engine.step()
        engine.cancel(str(attempt))
        reached.append(run(engine)[str(attempt)].end.cached_tokens)
    assert reached == [0, 100, 200, 300]
    engine.submit(submit("last", prompt, 5))
    assert run(engine)["last"].tokens == plain_loop(model, prompt, 5)


def test_a_prompt_known_to_its_end_still_computes_one_token(model):
    """R-4."""
    engine = make_engine(model, prefix_bytes=PLENTY)
    prompt = tokens(1, 80)
    for name in ("a", "b"):
        engine.submit(submit(name, prompt, 5))
        reply = run(engine)[name]
        assert reply.tokens == plain_loop(model, prompt, 5)
        assert reply.end.prompt_tokens == 80
    assert 70 < reply.end.cached_tokens <= 79


def test_another_tail_after_a_shared_start_is_not_answered_with_the_first_one(model):
    """S02, S03: tails shorter and longer than the window, which leave the stored prefix inside and outside of it."""
    engine = make_engine(model, prefix_bytes=PLENTY)
    for length in (1, 23, 24, 25, 60):
        prompt = [*tokens(1, 40), *tokens(length, length)]
        for name in ("first", "again"):
            engine.submit(submit(name, prompt, 30))
            assert run(engine)[name].tokens == plain_loop(model, prompt, 30)


def test_stored_prefixes_give_way_to_rows(model):
    """Memory: what is stored goes before a request is refused, and a refusal is never sticky."""
    engine = make_engine(model, prefix_bytes=PLENTY, cache_bytes=600 * model.facts.cache_bytes_per_token)
    for seed in range(12):
        engine.submit(submit("a", tokens(seed, 200), 5))
        assert run(engine)["a"].tokens
        assert engine.prefixes.nbytes <= engine.limits.cache_bytes
    engine.submit(submit("big", tokens(50, 500), 5))
    engine.step()
    counts = engine.counts()
    assert counts.reserved_bytes + counts.snapshot_bytes <= engine.limits.cache_bytes
    assert run(engine)["big"].tokens == plain_loop(model, tokens(50, 500), 5)
    engine.submit(submit("too big", tokens(51, 900), 5))
    assert isinstance(run(engine)["too big"].end, Failed)
    engine.submit(submit("after", tokens(0, 200), 5))
    assert run(engine)["after"].tokens


def test_a_lower_limit_drops_stored_prefixes_at_once(model):
    engine = make_engine(model, prefix_bytes=PLENTY, cache_bytes=PLENTY)
    engine.submit(submit("a", tokens(1, 900), 5))
    run(engine)
    assert engine.prefixes.nbytes > 100_000
    engine.limit(2048, 100_000)
    assert engine.prefixes.nbytes <= 100_000


def test_nothing_of_a_failed_row_is_found_again(model, monkeypatch):
    engine = make_engine(model, prefill_chunk=50, prefix_bytes=PLENTY)
    prompt = tokens(1, 300)
    engine.submit(submit("before", prompt[:120], 3))
    run(engine)
    forward, calls = model.forward, []

    def failing(batch):
        calls.append(batch)
        if len(calls) == 3:
            raise RuntimeError("the device is gone for a moment")
        return forward(batch)

    monkeypatch.setattr(model, "forward", failing)
    engine.submit(submit("fails", prompt, 3))
    assert isinstance(run(engine)["fails"].end, Failed)
    engine.submit(submit("after", prompt, 3))
    reply = run(engine)["after"]
    assert reply.tokens == plain_loop(model, prompt, 3)
    assert reply.end.cached_tokens <= 120


def test_what_shares_memory_with_a_failed_row_is_forgotten(model):
    store = PrefixStore(model, PLENTY)
    tokens_of = {"kept": tokens(1, 40), "failed": [*tokens(1, 40), *tokens(2, 40)]}
    caches = {}
    for name, prompt in tokens_of.items():
        reuse = store.begin(row_keys([*prompt, 0]))
        caches[name] = reuse
        new = prompt[reuse.offset :]
        model.forward(Batch(mx.array(new, mx.int32), [Span(0, len(new), reuse.offset, reuse.caches)]))
        if name == "kept":
            store.close(reuse, row_keys(prompt))
    store.share(caches["failed"], row_keys(tokens_of["failed"]))
    assert store.known(row_keys(tokens_of["failed"])) > 0
    store.abandon(caches["failed"])
    assert store.known(row_keys(tokens_of["failed"])) == 0


def test_a_broken_prefix_is_reported_with_what_is_stored_instead(model):
    engine = make_engine(model, prefix_bytes=PLENTY)
    first = tokens(1, 100)
    engine.submit(submit("a", first, 5))
    run(engine)
    second = [*first[:50], (first[50] + 1) % VOCAB, *first[51:]]
    engine.submit(submit("b", second, 5))
    used = run(engine)["b"].prefix
    assert (used.total, used.matched) == (100, 50)
    assert used.stored == first[50:58]


def test_without_a_budget_nothing_is_stored(model):
    engine = make_engine(model)
    for name in ("a", "b"):
        engine.submit(submit(name, tokens(1, 100), 5))
        reply = run(engine)[name]
        assert reply.end.cached_tokens == 0
        assert reply.prefix is None
    assert engine.prefixes.nbytes == 0


def test_thirty_turns_with_room_for_few_states_keep_the_newest(model):
    """S05: the newest state of a growing conversation is never the one that goes."""
    engine = make_engine(model, prefix_bytes=700 * model.facts.cache_bytes_per_token)
    prompt, hits = tokens(1, 20), []
    for turn in range(30):
        engine.submit(submit("a", prompt, 4))
        reply = run(engine)["a"]
        hits.append(reply.end.cached_tokens / len(prompt))
        prompt = [*prompt, *reply.tokens, *tokens(turn, 6)]
    assert min(hits[1:]) > 0.5
    assert min(hits[-10:]) > 0.9
