"""Drafts in rounds of speculation: the plain loop's tokens, the reference's rounds, caches that no guess touches."""

from __future__ import annotations

import json
import random
from itertools import cycle

import mlx.core as mx
import numpy as np
import pytest

from arriero.model.architectures import load_model
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Draft, Model
from arriero.model.drafts import load_draft, load_head
from arriero.source import FolderSource
from tests.helpers.drafts import GOLDENS, cache_bits, draft_checkpoint, target_ids, target_of, with_head
from tests.helpers.rounds import Speculation, offsets, plain_greedy

pytestmark = pytest.mark.usefixtures("kernels")

NAMES = [
    "assistant_26b_a4b",
    "assistant_e2b",
    "dflash2",
    "dflash_full",
    "dflash_gemma4",
    "dflash_laguna",
    "dflash_mixed",
    "mtp_qwen3_5_moe",
    "mtp_qwen4_exp",
]
COUNT = 24


def draft_of(name: str, target: Model) -> Draft:
    if not name.startswith("mtp"):
        return load_draft(draft_checkpoint(name).typed(), target, mx.float32)
    found = load_head(with_head(name).typed(), target, mx.float32)
    assert found is not None
    return found


@pytest.fixture(params=NAMES, scope="module")
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def target(name: str) -> Model:
    return target_of(name)


@pytest.fixture(scope="module")
def draft(name: str, target: Model) -> Draft:
    return draft_of(name, target)


@pytest.fixture(scope="module")
def prompt(name: str) -> list[int]:
    return target_ids(name)[:23]


@pytest.fixture(scope="module")
def expected(target: Model, prompt: list[int]) -> list[int]:
    return plain_greedy(target, prompt, COUNT + 8)


@pytest.mark.parametrize("pattern", ["the draft's", "always", "never", "in turns", "at random"])
def test_rounds_give_the_plain_loops_tokens_whatever_is_accepted(
    target: Model, draft: Draft, prompt: list[int], expected: list[int], pattern: str
) -> None:
    rng, turns = random.Random(7), cycle([True, True, False])
    right = {
        "always": lambda: True,
        "never": lambda: False,
        "in turns": lambda: next(turns),
        "at random": lambda: rng.random() < 0.7,
    }

    def force(position: int) -> int:
        token = expected[position - len(prompt)]
        return token if right[pattern]() else (token + 1) % target.facts.vocab_size

    row = Speculation(target, draft, None if pattern == "the draft's" else force)
    widths = cycle([1, 4, 3, 7, 2])
    limit = draft.facts.limit or 8
    found = row.generate(prompt, COUNT, lambda: min(limit, next(widths)), chunk=9)
    assert found == expected[:COUNT]
    assert set(offsets(row.caches)) == {len(row.tokens)}
    if pattern == "always":
        assert sum(r.produced for r in row.rounds) / len(row.rounds) > 2
    if pattern == "never":
        assert {r.produced for r in row.rounds} == {1}
    # What the draft holds is what it would hold had it been told everything at once.
    row.commit()
    fresh = Speculation(target, draft)
    fresh.prefill(row.tokens, 512)
    assert list(offsets(row.own)) == list(offsets(fresh.own))
    for one, other in zip(cache_bits(row.own), cache_bits(fresh.own), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_draft_that_was_parked_for_a_while_guesses_as_if_it_had_not_been(
    target: Model, draft: Draft, prompt: list[int], expected: list[int]
) -> None:
    parked, level = Speculation(target, draft), Speculation(target, draft)
    anchor = parked.prefill(prompt, 8)
    for _ in range(5):
        hidden = target.forward(parked._target_batch([anchor], len(parked.tokens)))
        parked.tokens.append(anchor)
        parked._keep(hidden, 1)
        anchor = int(mx.argmax(target.logits(hidden.final)[0]).item())
    assert level.prefill([*prompt, *expected[:5]], 512) == anchor
    count = min(3, draft.facts.limit or 3)
    assert parked.round(anchor, count) == level.round(anchor, count)
    for one, other in zip(parked.rounds[0].scores, level.rounds[0].scores, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("trace", ["trace_dflash", "trace_dflash2"])
def test_whole_generations_go_round_by_round_as_the_references_do(trace: str) -> None:
    target = load_model(Checkpoint.open(FolderSource(str(GOLDENS / "trace_target"))), mx.float32)
    draft = load_draft(draft_checkpoint(trace).typed(), target, mx.float32)
    assert draft.facts.limit is not None
    golden = json.loads((GOLDENS / trace / "trace.json").read_text())
    row, budget = Speculation(target, draft), len(golden["output"])
    out = [row.prefill(golden["prompt"], 512)]
    for verified, produced in zip(golden["verified"], golden["produced"], strict=True):
        out += row.round(out[-1], len(verified) - 1)
        assert row.rounds[-1].block == verified
        assert min(row.rounds[-1].produced, budget - len(out) + row.rounds[-1].produced) == produced
    assert out[:budget] == golden["output"] == plain_greedy(target, golden["prompt"], budget)
    assert len(set(golden["produced"])) >= 2
