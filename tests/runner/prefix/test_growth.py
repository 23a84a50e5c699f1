"""However many prefixes are stored: looking one up, storing and forgetting stay quick, and so does counting."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import mlx.core as mx
import pytest

import arriero.runner.prefix.trie as trie_module
from arriero.model.architectures import load_model
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Model
from arriero.runner.prefix.keys import row_keys
from arriero.source import FolderSource
from tests.helpers.engine_runs import make_engine, plain_loop, run, submit
from tests.helpers.layer_stores import asked, feed, store_of
from tests.helpers.tiny_model import VOCAB, TinyModel

GOLDENS = Path(__file__).parents[2] / "model" / "goldens"
PLENTY = 1 << 40
LAYERS = {"full": "f" * 24, "hybrid": "rrrf" * 6, "states": "r" * 12}


@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
def test_a_thousand_stored_nodes_cost_milliseconds(layers: str) -> None:
    rng, store = random.Random(0), store_of(layers)
    shared = [rng.randrange(1000) for _ in range(20)]
    while len(store.trie) < 1000:
        reuse, keys = asked(store, [*shared, *(rng.randrange(1000) for _ in range(20))])
        store.close(reuse, keys)
    began, closed, counted = [], [], []
    for _ in range(15):
        keys = row_keys([*shared, *(rng.randrange(1000) for _ in range(20))])
        start = time.perf_counter()
        reuse = store.begin(keys, [10, 25])
        began.append(time.perf_counter() - start)
        feed(reuse.caches, len(keys) - 1 - reuse.offset)
        start = time.perf_counter()
        store.close(reuse, keys)
        closed.append(time.perf_counter() - start)
        start = time.perf_counter()
        assert store.nbytes > 0
        counted.append(time.perf_counter() - start)
    assert median(began) < 0.01
    assert median(closed) < 0.01
    assert median(counted) < 0.0001


def test_forgetting_half_of_a_thousand_nodes_is_no_pause() -> None:
    rng, store = random.Random(0), store_of("rrrf")
    while len(store.trie) < 1000:
        reuse, keys = asked(store, [rng.randrange(1000) for _ in range(40)])
        store.close(reuse, keys)
    half = store.nbytes // 2
    start = time.perf_counter()
    store.shrink(half)
    assert time.perf_counter() - start < 3
    assert 0 < store.nbytes <= half


@pytest.mark.parametrize("layers", ["f", "rf", "r"])
def test_nodes_are_bounded_however_few_bytes_they_hold(layers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trie_module, "MOST_NODES", 50)
    rng, store = random.Random(0), store_of(layers)
    for _ in range(300):
        reuse, keys = asked(store, [rng.randrange(1000) for _ in range(12)])
        store.close(reuse, keys)
        assert len(store.trie) <= 50
    reuse, _ = asked(store, [*keys.tolist(), 1, 2, 3])
    assert reuse.offset >= 8, "the newest is still there"


def test_a_prompt_of_100_000_tokens_is_looked_up_in_milliseconds() -> None:
    rng, store = random.Random(0), store_of("f")
    prompt = [rng.randrange(1000) for _ in range(100_000)]
    for end in (20_000, 50_000, 100_000):
        reuse, keys = asked(store, prompt[:end])
        store.close(reuse, keys)
    for _ in range(200):
        reuse, keys = asked(store, [*prompt[:30], *(rng.randrange(1000) for _ in range(12))])
        store.close(reuse, keys)
    keys = row_keys([*prompt, 1])
    times = []
    for _ in range(5):
        start = time.perf_counter()
        reuse = store.begin(keys)
        times.append(time.perf_counter() - start)
        assert reuse.offset == 99_999
        store.close(reuse, keys)
    assert median(times) < 0.01


def test_2000_short_requests_leave_memory_and_the_trie_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """R10, R01 with prefixes stored."""
    monkeypatch.setattr(trie_module, "MOST_NODES", 200)
    model = TinyModel("fs", context=256)
    budget = 3_000_000
    engine = make_engine(model, prefix_bytes=budget)
    rng = random.Random(3)
    held = []
    for number in range(2000):
        prompt = [rng.randrange(VOCAB) for _ in range(6)]
        engine.submit(submit("a", prompt, 2))
        replies = run(engine)
        assert engine.prefixes.nbytes <= budget
        if number % 400 == 399:
            assert replies["a"].tokens == plain_loop(model, prompt, 2)
            held.append(mx.get_active_memory())
    assert len(engine.prefixes.trie) <= 200
    assert held[-1] - held[0] < 300_000


@pytest.mark.parametrize("name", ["nemotron_h", "windows"])
def test_thousands_of_steps_leave_memory_flat_with_prefixes_stored(name: str) -> None:
    """R10: neither states nor captures of a long reply pile up."""
    steps = 2500
    if name == "windows":
        model: Model = TinyModel("ss", context=steps + 400)
    else:
        model = load_model(Checkpoint.open(FolderSource(str(GOLDENS / name))), mx.float32)
        model.facts = replace(model.facts, context_length=steps + 400)
    engine = make_engine(model, prefix_bytes=PLENTY)
    engine.submit(submit("a", [1] * 300, steps))
    held = []
    for step in range(steps):
        engine.step()
        engine.drain()
        if step >= 500 and step % 250 == 0:
            held.append(mx.get_active_memory() - engine.counts().cache_bytes)
    assert max(held) - held[0] < 300_000, "a buffer more while a window moves"
