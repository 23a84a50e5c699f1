"""What the engine makes of stored prefixes: shared, kept after a cancel, dropped under pressure, not a failed row's."""

from __future__ import annotations

import random
from types import SimpleNamespace

import mlx.core as mx
import pytest

from arriero.model.contract import Batch, Span
from arriero.runner.caches import KVCache, RecurrentCache
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


def test_rows_whose_leader_left_follow_one_of_them(model):
    """What the leader had not read is read once, too, and not by each of those that waited."""
    engine = make_engine(model, prefill_chunk=50, prefix_bytes=PLENTY)
    prompts = {name: [*tokens(1, 1000), *tokens(seed, 20)] for seed, name in enumerate("abcd", 2)}
    for name, prompt in prompts.items():
        engine.submit(submit(name, prompt, 5))
    for _ in range(4):
        engine.step()
    engine.cancel("a")
    replies = run(engine)
    assert all(replies[name].tokens == plain_loop(model, prompts[name], 5) for name in "bcd")
    assert all(replies[name].end.cached_tokens >= 1000 for name in "cd")
    assert evaluated(engine) < 1100 + 3 * 25


def test_rows_that_share_more_with_each_other_than_with_their_leader_read_it_once(model):
    engine = make_engine(model, prefill_chunk=50, prefix_bytes=PLENTY)
    leader = [*tokens(1, 200), *tokens(2, 600)]
    both = [*tokens(1, 200), *tokens(3, 600)]
    engine.submit(submit("a", leader, 5))
    for name in "bc":
        engine.submit(submit(name, [*both, *tokens(ord(name), 10)], 5))
    replies = run(engine)
    assert replies["b"].end.cached_tokens == 200
    assert replies["c"].end.cached_tokens == 800
    for name in "bc":
        assert replies[name].tokens == plain_loop(model, [*both, *tokens(ord(name), 10)], 5)


@pytest.mark.parametrize("rows", [1, 2])
def test_followers_with_room_for_few_rows_all_end(model, rows):
    """One of them is cancelled while it waits, and a stranger stands between them."""
    engine = make_engine(model, prefill_chunk=50, max_rows=rows, prefix_bytes=PLENTY)
    prompts = {name: [*tokens(1, 300), *tokens(seed, 9)] for seed, name in enumerate("abcd", 2)}
    prompts["stranger"] = tokens(99, 200)
    for name in ("a", "b", "stranger", "c", "d"):
        engine.submit(submit(name, prompts[name], 5))
    engine.step()
    engine.cancel("c")
    replies = run(engine)
    assert replies["c"].reason == "cancelled"
    assert all(replies[name].tokens == plain_loop(model, prompts[name], 5) for name in ("a", "b", "d", "stranger"))


@pytest.mark.parametrize("end", ["length", "cancelled"])
def test_a_store_that_fails_loses_no_reply(model, monkeypatch, caplog, end):
    engine = make_engine(model, prefix_bytes=PLENTY)
    engine.submit(submit("a", tokens(1, 100), 8))
    engine.submit(submit("b", tokens(2, 50), 20))
    engine.step()

    def failing(*_):
        raise RuntimeError("no room for a copy")

    with monkeypatch.context() as patch:
        patch.setattr(PrefixStore, "_attach", failing)
        if end == "cancelled":
            engine.cancel("a")
        replies = collect(engine)
        while "a" not in replies or replies["a"].end is None:
            engine.step()
            collect(engine, replies)
    run(engine, replies)
    assert replies["a"].reason == end
    assert replies["b"].tokens == plain_loop(model, tokens(2, 50), 20)
    assert "cannot be kept" in caplog.text
    assert engine.counts().reserved_bytes == 0
    engine.submit(submit("a", tokens(1, 100), 8))
    assert run(engine)["a"].tokens == plain_loop(model, tokens(1, 100), 8)


def test_states_of_a_failed_row_are_forgotten_where_nothing_else_shares_its_memory():
    """A model of whole states only: there is no buffer by which its nodes could be told."""
    store = PrefixStore(SimpleNamespace(new_caches=lambda: [RecurrentCache(2, 4, mx.float32, (2, 2))]), PLENTY)
    keys = row_keys(tokens(1, 60))
    good = store.begin(keys[:20])
    feed_states(good.caches[0], 20)
    store.close(good, keys[:20])
    failing = store.begin(keys)
    assert failing.offset == 16 or failing.offset == 20
    feed_states(failing.caches[0], 59 - failing.offset)
    store.share(failing, keys)
    assert store.known(keys) == 56
    store.abandon(failing)
    assert store.known(keys) == 20


def feed_states(cache, length: int) -> None:
    state = (mx.zeros((1, 2, 4)), mx.zeros((1, 2, 2)))
    cache.put([state] * (len(cache.splits(length)) + 1), length)


def test_a_branch_copies_the_shorter_side_and_counts_it_at_once(model):
    """R-54: a row that goes back in caches it took over has moved what it will overwrite before it writes."""
    store = PrefixStore(model, PLENTY)
    long = tokens(1, 1000)

    def read(prompt: list[int]) -> None:
        reuse = store.begin(row_keys([*prompt, 0]))
        new = prompt[reuse.offset :]
        model.forward(Batch(mx.array(new, mx.int32), [Span(0, len(new), reuse.offset, reuse.caches)]))
        mx.eval([array for cache in reuse.caches for array in cache.state()])
        store.close(reuse, row_keys(prompt))

    read(long)
    kept = store.nbytes
    early = store.begin(row_keys([*long[:100], *tokens(2, 50)]))
    assert store.nbytes == kept, "900 positions stay where they are, 100 are copied"
    late = store.begin(row_keys([*long[:900], *tokens(3, 50)]))
    full = [cache for cache in late.caches if isinstance(cache, KVCache)]
    moved = [node for node in store.trie.nodes() if node.nbytes]
    assert late.offset == 900
    assert all(cache.nbytes > 1000 * 256 for cache in full), "900 positions stay where they are, 100 are copied"
    assert (moved[0].start, moved[-1].end) == (900, 1000)
    assert 0 < store.nbytes <= 100 * model.facts.cache_bytes_per_token
    assert store.known(row_keys(long)) == 1000
    store.close(early, row_keys(long[:100]))
    store.close(late, row_keys(long[:900]))
