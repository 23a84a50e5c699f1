"""Every draft beside its target: the plain loop's tokens, and caches of the draft that only hold what was committed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from arriero.model.contract import Batch, Draft, Model, Pick, Span
from arriero.model.drafts import load_draft, load_head
from arriero.runner.engine import Engine
from arriero.runner.messages import SamplingOptions
from tests.helpers.drafts import GOLDENS, cache_bits, draft_checkpoint, target_of, with_head
from tests.helpers.engine_runs import GREEDY, collect, make_engine, plain_loop, run, submit
from tests.helpers.speculation import PATTERNS, Pattern, speculating

NAMES = sorted(
    folder.name
    for folder in GOLDENS.iterdir()
    if (folder / "golden.npz").is_file() and "target" in draft_checkpoint(folder.name).config
)
HEADS = [name for name in NAMES if name.startswith("mtp")]
SEEDED = SamplingOptions(temperature=0.8, top_k=12, top_p=0.95, repeat_penalty=1.1, seed=77)


@cache
def pair(name: str) -> tuple[Model, Draft]:
    """The golden draft and its target, in float32."""
    target = target_of(name)
    if name in HEADS:
        head = load_head(with_head(name).typed(), target, mx.float32)
        assert head is not None
        return target, head
    return target, load_draft(draft_checkpoint(name).typed(), target, mx.float32)


class Prompted:
    """A draft that does all its work and then proposes what a script says."""

    def __init__(self, draft: Draft, prompt: Sequence[int], reply: Sequence[int], pattern: Pattern) -> None:
        self.draft, self.facts = draft, draft.facts
        self.prompt, self.reply, self.pattern = prompt, reply, pattern
        self.vocab = draft.target.facts.vocab_size  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.draft, name)

    def propose(self, batch: Batch, states: mx.array, anchor: mx.array, count: int, pick: Pick) -> mx.array:
        found = self.draft.propose(batch, states, anchor, count, pick)
        span = batch.spans[0]
        at = span.position + span.length + 1 - len(self.prompt)
        coming = list(enumerate(self.reply))[at : at + count]
        said = [t if self.pattern(i) else (t + 1) % self.vocab for i, t in coming]
        return mx.array(said, mx.int32) + 0 * found[: len(said)]


def prompt_for(model: Model, length: int = 19) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(model.facts.vocab_size) for _ in range(length)]


@cache
def wanted(name: str, sampling: SamplingOptions = GREEDY, count: int = 60) -> list[int]:
    model, _ = pair(name)
    return plain_loop(model, prompt_for(model), count, sampling)


def told(draft: Draft, model: Model, tokens: Sequence[int], length: int) -> list[np.ndarray]:
    """What a draft's caches hold when it is told the states of `length` positions at once."""
    caches = model.new_caches()
    batch = Batch(mx.array(tokens[:length], mx.int32), [Span(0, length, 0, caches)], taps=draft.facts.taps)
    hidden = model.forward(batch)
    states = hidden.taps if draft.facts.taps else hidden.for_head
    ahead, own = draft.facts.lookahead, draft.new_caches()
    draft.commit(Batch(mx.array(tokens[ahead : length + ahead], mx.int32), [Span(0, length, 0, own)]), states)
    return cache_bits(own)


def only_row(engine: Engine) -> Any:
    return engine._rows[0]


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("name", NAMES)
def test_a_draft_changes_no_token(name: str, sampling: SamplingOptions) -> None:
    model, draft = pair(name)
    engine = speculating(model, draft=draft, widths=(3, 1, 0, 7, 2), prefill_chunk=5)
    engine.submit(submit("a", prompt_for(model), 60, sampling=sampling))
    reply = run(engine)["a"]
    assert reply.tokens == wanted(name, sampling)
    assert reply.end.speculation.rounds > 10
    assert reply.end.speculation.kind == draft.facts.architecture


@pytest.mark.parametrize("pattern", ["always", "random", "never"])
@pytest.mark.parametrize("name", NAMES)
def test_after_every_round_a_drafts_caches_are_those_of_one_that_was_told_all_at_once(name: str, pattern: str) -> None:
    model, draft = pair(name)
    prompt = prompt_for(model)
    scripted = Prompted(draft, prompt, wanted(name), PATTERNS[pattern])
    engine = speculating(model, draft=scripted, widths=(3, 0, 0, 7, 1, 2), prefill_chunk=6)
    engine.submit(submit("a", prompt, 60))
    replies: dict = {}
    checked = 0
    while engine.busy:
        engine.step()
        collect(engine, replies)
        if engine._rows and only_row(engine).outputs and not draft.facts.reads_target:
            row = only_row(engine)
            tokens = [*prompt, *row.outputs]
            assert row.session.offset + row.session.waiting == row.position
            offset = row.session.offset
            if checked < 6 and offset:
                for found, expected in zip(
                    cache_bits(row.session.caches), told(draft, model, tokens, offset), strict=True
                ):
                    assert found.shape == expected.shape
                    assert np.allclose(found, expected, atol=1e-4)
                checked += 1
    reply = replies["a"]
    assert reply.tokens == wanted(name)
    used = reply.end.speculation
    assert used.accepted == {"always": used.drafted, "never": 0}.get(pattern, used.accepted)
    assert used.rounds > 5


@pytest.mark.parametrize("name", NAMES)
def test_rows_beside_it_park_a_draft_which_goes_on_level(name: str) -> None:
    model, draft = pair(name)
    prompt = prompt_for(model)
    scripted = Prompted(draft, prompt, wanted(name), PATTERNS["random"])
    engine = speculating(model, draft=scripted, widths=(4,), prefill_chunk=6)
    engine.submit(submit("a", prompt, 60))
    replies: dict = {}
    for step in range(300):
        if step in (8, 10):
            engine.submit(submit(f"beside {step}", prompt_for(model, 11), 9))
        if step == 14:
            engine.cancel("beside 10")
        engine.step()
        collect(engine, replies)
    assert not engine.busy
    assert replies["a"].tokens == wanted(name)
    assert replies["a"].end.speculation.rounds > 8
    assert replies["beside 8"].tokens == plain_loop(model, prompt_for(model, 11), 9)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_draft_takes_nothing_from_the_reuse_of_prompts(name: str, ahead: bool) -> None:
    """S06: as many tokens are restored on every turn as without one, and it drafts as well as on a cold start."""
    model, draft = pair(name)
    prompt = prompt_for(model)
    turns, replies = [prompt], []
    for _ in range(3):
        replies.append(plain_loop(model, turns[-1], 15))
        turns.append([*turns[-1], *replies[-1], 5, 6, 7])
    cached: dict[str, list[int]] = {}
    for kind in ("plain", "drafting"):
        engine = (
            make_engine(model, ahead, prefix_bytes=1 << 26)
            if kind == "plain"
            else speculating(model, draft=draft, widths=(3, 0, 5), ahead=ahead, prefix_bytes=1 << 26)
        )
        cached[kind] = []
        for i, reply in enumerate(replies):
            engine.submit(submit(str(i), turns[i], 15))
            found = run(engine)[str(i)]
            assert found.tokens == reply
            cached[kind].append(found.end.cached_tokens)
    # Drafting leaves the last token out of the caches, which may be one position less.
    assert all(d >= p - 1 for d, p in zip(cached["drafting"], cached["plain"], strict=True))
    assert cached["drafting"][1:] > [0, 0]
