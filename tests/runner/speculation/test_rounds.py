"""Rounds within the engine: what they compute, what they count, and what happens when something goes wrong."""

from __future__ import annotations

import logging
import random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from arriero.model.contract import Batch, Pick
from arriero.runner.messages import Finished, Grammar, SamplingOptions, Submit, Vocabulary
from arriero.runner.row import reserved_bytes
from arriero.runner.speculation.controller import EveryRound
from arriero.runner.speculation.rounds import keeps_states
from arriero.runner.speculation.session import FLUSH
from arriero.runner.speculation.speculator import Speculator
from arriero.runner.speculation.stats import Tally
from tests.helpers.draft_cases import KINDS, pair, prompt_for
from tests.helpers.drafts import target_of
from tests.helpers.engine_runs import GREEDY, collect, make_engine, plain_loop, run, submit
from tests.helpers.markov import MarkovDraft, MarkovModel
from tests.helpers.speculation import PATTERNS, Widths, speculating
from tests.helpers.tiny_model import VOCAB, TinyModel

PROMPT = random.Random(4).choices(range(VOCAB), k=30)


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return TinyModel(layers="fs", window=24)


@pytest.fixture(scope="module")
def wanted(model: TinyModel) -> list[int]:
    return plain_loop(model, PROMPT, 60)


def test_a_round_is_one_forward_of_the_target_and_one_wait(model, wanted, monkeypatch) -> None:
    """R-60."""
    engine = speculating(model, replies={tuple(PROMPT): wanted}, pattern=PATTERNS["random"], widths=(4,))
    engine.submit(submit("a", PROMPT, 60))
    for _ in range(3):
        engine.step()
    assert engine.counts().draft_rounds
    waits = []
    evaluate = mx.eval
    monkeypatch.setattr(mx, "eval", lambda *arrays: waits.append(1) or evaluate(*arrays))
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: waits.append(1))
    for _ in range(6):
        forwards, rounds, waited = model.forwards, engine.counts().draft_rounds, len(waits)
        engine.step()
        assert engine.counts().draft_rounds == rounds + 1
        assert model.forwards == forwards + 1
        assert len(waits) == waited + 1


ASKING = SamplingOptions(temperature=0.7, seed=3, repeat_penalty=1.2, logprobs=True, top_logprobs=2)


@pytest.mark.parametrize("sampling", [GREEDY, SamplingOptions(temperature=1.0), ASKING], ids=["best", "ratio", "same"])
@pytest.mark.parametrize("name", [name for name in KINDS if name != "mtp_qwen4_exp"])
def test_the_host_reads_nothing_of_a_round_before_it_waits_once(name, sampling, monkeypatch) -> None:
    """R-60. Reading an array that is not computed yet is a wait that nobody sees.

    All but Flash Next's, whose hashed n-grams are rows of a table on the host: the guesses are waited for there.
    """
    target, draft = pair(name)
    engine = speculating(target, draft=draft, widths=(3,))
    engine.submit(submit("a", prompt_for(name), 60, sampling=sampling))
    for _ in range(5):
        engine.step()
    seen: list[str] = []
    evaluate, read = mx.eval, np.array

    def reading(source: Any, *more: Any, **named: Any) -> Any:
        if isinstance(source, mx.array):
            seen.append("read")
        return read(source, *more, **named)

    monkeypatch.setattr(mx, "eval", lambda *arrays: seen.append("wait") or evaluate(*arrays))
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: seen.append("wait"))
    monkeypatch.setattr(np, "array", reading)
    for _ in range(4):
        seen.clear()
        rounds = engine.counts().draft_rounds
        engine.step()
        assert engine.counts().draft_rounds == rounds + 1
        assert seen[0] == "wait"
        assert seen.count("wait") == 1


def test_rejecting_drafts_of_keys_and_values_keeps_the_buffers(model, wanted) -> None:
    """R-39."""
    engine = speculating(model, replies={tuple(PROMPT): wanted}, pattern=PATTERNS["never"], widths=(6,))
    engine.submit(submit("a", PROMPT, 50))
    engine.step()
    engine.step()
    held = engine.counts().cache_bytes
    for _ in range(30):
        engine.step()
    assert engine.counts().cache_bytes == held


def test_a_row_says_what_drafting_did(model, wanted, caplog) -> None:
    """R-66."""
    engine = speculating(model, replies={tuple(PROMPT): wanted}, pattern=lambda i: i % 4 != 2, widths=(3, 0))
    engine.submit(submit("a", PROMPT, 40))
    with caplog.at_level(logging.INFO):
        end = run(engine)["a"].end
    assert isinstance(end, Finished)
    used = end.speculation
    assert used.kind == "lookup"
    assert used.rounds + used.accepted + used.plain_steps == 40
    assert used.accepted == sum(used.accepted_by_position)
    assert used.reached_by_position[0] == used.rounds
    assert all(a <= r for a, r in zip(used.accepted_by_position, used.reached_by_position, strict=True))
    assert used.parked_ns > 0
    assert f"{used.rounds} rounds, {used.accepted} of {used.drafted} drafts stayed" in caplog.text
    counts = engine.counts()
    assert (counts.draft_rounds, counts.drafts_accepted) == (used.rounds, used.accepted)


def test_an_accepted_stop_token_counts_and_what_is_behind_it_does_not(model, wanted) -> None:
    """R-67."""
    engine = speculating(model, replies={tuple(PROMPT): wanted}, widths=(8,))
    stop = next(token for i, token in enumerate(wanted[:8]) if i >= 3 and token not in wanted[:i])
    at = wanted.index(stop)
    engine.submit(submit("a", PROMPT, 40, stop=[stop]))
    used = run(engine)["a"].end.speculation
    assert (used.rounds, used.drafted, used.accepted) == (1, 8, at + 1)
    assert used.reached_by_position == [1] * (at + 1) + [0] * (7 - at)


def test_an_engine_without_a_speculator_says_nothing_of_drafts(model) -> None:
    engine = make_engine(model)
    engine.submit(submit("a", PROMPT, 5))
    assert run(engine)["a"].end.speculation is None
    assert engine.speculation == ""


def test_a_cap_bounds_every_draft() -> None:
    target = MarkovModel(seed=3)
    engine = speculating(target, draft=MarkovDraft(target), widths=(8,), cap=2)
    engine.submit(submit("a", [1, 2], 40))
    used = run(engine)["a"].end.speculation
    assert len(used.reached_by_position) == 2


class Breaking(MarkovDraft):
    """A draft that fails at its n-th proposal."""

    def __init__(self, target: MarkovModel, after: int) -> None:
        super().__init__(target)
        self.left = after

    def propose(self, batch: Batch, states: mx.array, anchor: mx.array, count: int, pick: Pick) -> mx.array:
        self.left -= 1
        if self.left == 0:
            raise ValueError("the draft is broken")
        return super().propose(batch, states, anchor, count, pick)


def test_a_draft_that_fails_ends_its_row_and_the_next_one_runs(caplog) -> None:
    target = MarkovModel(seed=3)
    engine = speculating(target, draft=Breaking(target, 4), widths=(3,), prefix_bytes=1 << 20)
    engine.submit(submit("a", [1, 2], 40))
    engine.submit(submit("b", [1, 2], 40))
    engine.limits = type(engine.limits)(context_length=1000, max_rows=1)
    replies = run(engine)
    assert "the draft is broken" in replies["a"].end.message
    assert replies["b"].tokens == plain_loop(target, [1, 2], 40)


def test_a_verification_that_fails_ends_its_row_and_leaves_nothing_behind(model, wanted, monkeypatch) -> None:
    """Catalogue 12."""
    engine = speculating(model, replies={tuple(PROMPT): wanted}, widths=(5,), prefix_bytes=1 << 24)
    engine.submit(submit("a", PROMPT, 60))
    for _ in range(4):
        engine.step()
    logits = model.logits
    monkeypatch.setattr(model, "logits", lambda hidden: (_ for _ in ()).throw(RuntimeError("no logits")))
    engine.step()
    monkeypatch.setattr(model, "logits", logits)
    replies = collect(engine)
    assert "no logits" in replies["a"].end.message
    engine.submit(submit("b", PROMPT, 60))
    assert run(engine)["b"].tokens == wanted


def test_a_draft_whose_scores_are_no_numbers_changes_nothing() -> None:
    """Catalogue 47."""
    target = MarkovModel(seed=3)
    draft = MarkovDraft(target)
    draft.table = draft.table * float("nan")
    for options in (GREEDY, SamplingOptions(temperature=1.0, seed=5)):
        engine = speculating(target, draft=draft, widths=(3,))
        engine.submit(submit("a", [1, 2], 50, sampling=options))
        assert run(engine)["a"].tokens == plain_loop(target, [1, 2], 50, options)
    engine = speculating(target, draft=draft, widths=(3,))
    engine.submit(submit("a", [1, 2], 50, sampling=SamplingOptions(temperature=1.0)))
    reply = run(engine)["a"]
    assert all(0 <= token < target.facts.vocab_size for token in reply.tokens)
    assert reply.end.speculation.accepted == 0


def test_states_that_wait_for_a_parked_draft_are_bounded() -> None:
    """R-70."""
    target = MarkovModel(seed=3)
    engine = speculating(target, draft=MarkovDraft(target), widths=(0,))
    engine.submit(submit("a", [1, 2], 700))
    most = 0
    while engine.busy:
        engine.step()
        if engine._rows:
            most = max(most, engine._rows[0].session.waiting)
    assert 200 < most <= FLUSH + 1


def test_memory_of_a_draft_is_reserved_with_the_targets(monkeypatch) -> None:
    target = target_of("mtp_qwen3_5")
    plain = make_engine(target)
    draft: Any = MarkovDraft(MarkovModel())
    draft.facts = type(draft.facts)("fat", None, cache_bytes_per_token=1000, cache_bytes_fixed=7)
    drafting = speculating(target, draft=draft)
    for engine in (plain, drafting):
        engine.submit(submit("a", [1, 2, 3], 20))
        engine._admit()
    assert drafting.counts().reserved_bytes - plain.counts().reserved_bytes == 256 * 1000 + 7 + drafting.row_bytes


def test_a_row_whose_drafts_are_parked_says_how_long() -> None:
    now = iter(range(10_000))
    target = MarkovModel(seed=3)
    engine = speculating(target, draft=MarkovDraft(target), widths=(0,))
    engine._speculator._clock = lambda: float(next(now))
    engine.submit(submit("a", [1, 2], 11))
    used = run(engine)["a"].end.speculation
    assert used.plain_steps == 11
    assert used.parked_ns == 10 * 10**9


def test_depths_are_told_of_every_round() -> None:
    target = MarkovModel(seed=3)
    engine = speculating(target, draft=MarkovDraft(target), widths=(2, 0, 0))
    engine.submit(submit("a", [1, 2], 60))
    used = run(engine)["a"].end.speculation
    depths = engine._speculator.depths
    assert isinstance(depths, Widths)
    assert depths.begun == 1
    # The length of the first round is not known.
    assert sum(drafted > 0 for drafted, _, _, _ in depths.observed) in (used.rounds, used.rounds - 1)
    assert sum(drafted == 0 for drafted, _, _, _ in depths.observed) in (used.plain_steps, used.plain_steps - 1)


def test_a_repeating_reply_is_copied_from_itself() -> None:
    """Catalogue 46."""
    target = MarkovModel(seed=3)
    sampler_of = speculating(target)
    engine = speculating(target, widths=(8,))
    engine.submit(submit("a", [1, 2], 200))
    reply = run(engine)["a"]
    assert reply.tokens == plain_loop(target, [1, 2], 200)
    assert reply.end.speculation.accepted > 100
    assert sampler_of.speculation == "lookup"


def test_the_trial_of_a_draft_at_load_drafts_in_a_reply_of_four_tokens() -> None:
    target = MarkovModel(seed=3)
    engine = speculating(target, draft=MarkovDraft(target))
    engine._speculator.depths = EveryRound()
    engine.submit(submit("a", [1, 2, 3], 4))
    assert run(engine)["a"].end.speculation.rounds > 0


def test_a_tally_shows_depth_over_time() -> None:
    tally = Tally("x")
    for depth in (1, 1, 3, 3):
        tally.add(depth, 1, depth)
    tally.step(0.5)
    assert "4 rounds, 4 of 8 drafts stayed, 2.00 tokens a round" in str(tally)
    assert "1 plain steps" in str(tally)
    assert str(Tally("lookup")) == "lookup: nothing drafted in 0 steps"


def test_greedy_and_sampled_rows_take_turns_without_changing_each_other() -> None:
    target = MarkovModel(seed=3)
    seeded = SamplingOptions(temperature=1.0, seed=4, top_k=0, top_p=1.0)
    engine = speculating(target, draft=MarkovDraft(target), widths=(3,))
    for i in range(6):
        options = seeded if i % 2 else GREEDY
        engine.submit(submit(str(i), [1, 2], 30, sampling=options))
    replies = run(engine)
    for i in range(6):
        assert replies[str(i)].tokens == plain_loop(target, [1, 2], 30, seeded if i % 2 else GREEDY)


def test_a_speculator_names_what_drafts(model) -> None:
    engine = speculating(model)
    assert isinstance(engine._speculator, Speculator)
    assert engine.speculation == "lookup"


@pytest.mark.parametrize("candidates", [0, 4])
def test_log_probabilities_of_drawn_drafts_and_what_replaces_them_are_the_models_own(candidates) -> None:
    """Those of the raw logits, whatever the temperature, the penalties and the draft's own law."""
    target = MarkovModel(seed=3)
    asking = SamplingOptions(temperature=1.4, top_k=4, repeat_penalty=1.3, logprobs=True, top_logprobs=2)
    engine = speculating(target, draft=MarkovDraft(target, candidates=candidates), widths=(3, 1, 0))
    engine.submit(submit("a", [1, 2], 80, sampling=asking))
    reply = run(engine)["a"]
    used = reply.end.speculation
    assert 0 < used.accepted < used.drafted
    assert len(reply.logprobs) == len(reply.tokens) == 80
    for before, token, said in zip([2, *reply.tokens], reply.tokens, reply.logprobs, strict=False):
        row = target.table[before].astype(np.float64)
        logs = row - np.log(np.exp(row).sum())
        assert said.logprob == pytest.approx(logs[token], abs=1e-5)
        assert [t for t, _ in said.top] == np.argsort(-logs)[:2].tolist()


def test_the_states_of_a_round_are_counted_for_as_many_drafts_as_there_can_be() -> None:
    target, draft = pair("mtp_qwen3_5")
    caches = [cache for cache in target.new_caches() if keeps_states(cache)]
    for cache in caches:
        cache.get()
    state = sum(cache.nbytes for cache in caches)
    assert state > 0
    assert speculating(target, draft=draft).round_bytes == 8 * state
    assert speculating(target, draft=draft, cap=3).round_bytes == 3 * state
    assert speculating(TinyModel(layers="fs", window=24)).round_bytes == 0
    assert make_engine(target).round_bytes == 0


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_draft_keeps_of_each_row_is_reserved_for_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """States that wait for a parked draft, and the whole states to go back to behind the latest step."""
    monkeypatch.setattr("arriero.runner.speculation.speculator.FLUSH", 12)
    target, draft = pair(kind)
    engine = speculating(target, draft=draft, widths=(0,))
    engine.submit(submit("a", prompt_for(kind), 40))
    most = 0
    while engine.busy:
        engine.step()
        for row in engine._rows:
            kept = [array for _, state in row.undo for array in state.arrays]
            most = max(most, sum(array.nbytes for array in [*row.session._waiting, *kept]))
    beside = engine.row_bytes
    if draft.facts.reads_target:
        assert beside == 0
    else:
        assert 0.8 * beside < most <= beside
    needed = engine._checked(submit("b", prompt_for(kind), 40)).reserved
    assert needed == reserved_bytes(len(prompt_for(kind)) + 40, target.facts, draft.facts) + beside


def test_nothing_is_said_behind_a_drawn_draft_that_ends_a_reply_in_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it stay in a cache where an earlier draft did not stay."""
    numbers = random.Random(3)
    monkeypatch.setattr("arriero.runner.sampling.sampler.fresh_seed", lambda: numbers.getrandbits(64))
    target, draft = pair("mtp_qwen3_5")
    vocab = target.facts.vocab_size
    engine = speculating(target, draft=draft, widths=(3, 4), prefix_bytes=1 << 26)
    engine.learn(Vocabulary(tokens=[*(b"%03d" % i for i in range(vocab - 1)), b""], special=[vocab - 1]))
    grammar = Grammar(kind="regex", text="([0-9]{3}){6}")
    drawn = SamplingOptions(temperature=2.0, top_k=0, top_p=1.0)
    accepted, judged = 0, 0
    for i in range(24):
        prompt = prompt_for("mtp_qwen3_5", 9, seed=i)
        engine.submit(
            Submit(id="a", tokens=prompt, max_tokens=20, stop_tokens=[vocab - 1], sampling=drawn, grammar=grammar)
        )
        reply = run(engine)["a"]
        assert reply.reason == "stop"
        assert len(reply.tokens) == 6
        accepted, judged = accepted + reply.end.speculation.accepted, judged + reply.end.speculation.drafted
        turn = [*prompt, *reply.tokens, 3, 1, 4]
        engine.submit(submit("b", turn, 4))
        later = run(engine)["b"]
        assert later.tokens == plain_loop(target, turn, 4)
        assert later.end.cached_tokens >= len(prompt) - 4
    assert 0.2 < accepted / judged < 0.9


def test_the_caches_of_a_draft_are_counted_with_its_targets() -> None:
    target, draft = pair("mtp_qwen3_5")
    engine = speculating(target, draft=draft, widths=(0,), prefill_chunk=4)
    engine.submit(submit("a", prompt_for("mtp_qwen3_5"), 20))
    for _ in range(8):
        engine.step()
    row = engine._rows[0]
    own = sum(cache.nbytes for cache in row.session.caches)
    assert own > 0
    assert engine.counts().cache_bytes == own + sum(cache.nbytes for cache in row.caches if cache is not None)


@pytest.mark.parametrize("temperature", [0.0, 1.1])
def test_a_draft_that_guesses_as_its_target_does_is_always_right_where_a_seed_decides(temperature: float) -> None:
    """The target's numbers, and penalties that see the guesses before."""
    target = MarkovModel(seed=4)
    draft = MarkovDraft(target)
    draft.table = mx.array(target.table)
    engine = speculating(target, draft=draft, widths=(3, 5, 1))
    options = SamplingOptions(
        temperature=temperature, top_k=4, top_p=0.95, repeat_last_n=4, repeat_penalty=1.5, presence_penalty=0.7, seed=9
    )
    engine.submit(submit("a", [2, 0], 120, sampling=options))
    used = run(engine)["a"].end.speculation
    assert used.accepted == used.drafted > 60
