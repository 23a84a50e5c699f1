"""Drafts for replies that must fit a grammar: the text of the engine that drafts nothing."""

from __future__ import annotations

import json

import jsonschema
import mlx.core as mx
import numpy as np
import pytest

from arriero.runner.engine import Engine, Limits
from arriero.runner.messages import Grammar, SamplingOptions, Submit, Thoughts, Vocabulary
from arriero.runner.sampling import Sampler
from arriero.runner.speculation.fitting import within
from arriero.runner.speculation.speculator import Speculator
from arriero.runner.speculation.verify import Rule
from tests.helpers.chi_square import chi_square, improbable
from tests.helpers.engine_runs import run
from tests.helpers.grammars import SCHEMAS, THOUGHTS, TOKENS, VOCABULARY, answer, ask, schema
from tests.helpers.markov import MarkovDraft, MarkovModel
from tests.helpers.speculation import PATTERNS, Pattern, Scripted, Widths
from tests.helpers.tiny_model import TinyModel

MODEL = TinyModel("f", context=4096, seed=1, vocab=len(TOKENS))
LIMITS = Limits(context_length=4096, max_rows=1)


def plain() -> Engine:
    engine = Engine(MODEL, Sampler(len(TOKENS), 4096), LIMITS)
    engine.learn(VOCABULARY)
    return engine


def drafting(replies: dict[tuple[int, ...], list[int]], pattern: Pattern, ahead: bool = False) -> Engine:
    sampler = Sampler(len(TOKENS), 4096)
    speculator = Speculator(
        MODEL, sampler, copies=lambda: Scripted(replies, pattern, len(TOKENS)), depths=Widths(3, 8, 1, 0, 5)
    )
    engine = Engine(MODEL, sampler, LIMITS, ahead, speculator=speculator)
    engine.learn(VOCABULARY)
    return engine


@pytest.mark.parametrize(
    ("pattern", "ahead"), [("always", False), ("random", False), ("random", True), ("never", True)]
)
@pytest.mark.parametrize("thoughts", [None, THOUGHTS], ids=["at once", "behind thoughts"])
def test_drafts_change_no_token_of_a_reply_in_a_grammar(thoughts: Thoughts | None, pattern: str, ahead: bool) -> None:
    asked = {str(i): ask(str(i), schema(value, thoughts), seed=i, count=150) for i, value in enumerate(SCHEMAS[::3])}
    basis = plain()
    for request in asked.values():
        basis.submit(request)
    wanted = run(basis)
    replies = {tuple(request.tokens): wanted[row].tokens for row, request in asked.items()}
    engine = drafting(replies, PATTERNS[pattern], ahead)
    for request in asked.values():
        engine.submit(request)
    found = run(engine)
    for row in asked:
        assert found[row].tokens == wanted[row].tokens
        assert found[row].reason == wanted[row].reason
    accepted = sum(reply.end.speculation.accepted for reply in found.values())
    assert (accepted == 0) is (pattern == "never")


def test_greedy_replies_in_a_grammar_are_those_without_drafts() -> None:
    greedy = {"temperature": 0.0, "repeat_penalty": 1.3}
    asked = {str(i): ask(str(i), schema(value), seed=i, count=60, **greedy) for i, value in enumerate(SCHEMAS[1::5])}
    basis = plain()
    for request in asked.values():
        basis.submit(request)
    wanted = run(basis)
    replies = {tuple(request.tokens): wanted[row].tokens for row, request in asked.items()}
    engine = drafting(replies, PATTERNS["random"])
    for request in asked.values():
        engine.submit(request)
    found = run(engine)
    assert {row: reply.tokens for row, reply in found.items()} == {row: reply.tokens for row, reply in wanted.items()}


def test_sampled_drafts_give_replies_that_fit() -> None:
    """Judged by ratio: what a grammar rules out has no chance, however likely the draft thought it."""
    target = MarkovModel(vocab=len(TOKENS), seed=2)
    sampler = Sampler(len(TOKENS), 4096)
    speculator = Speculator(target, sampler, MarkovDraft(target), depths=Widths(3))
    engine = Engine(target, sampler, LIMITS, speculator=speculator)
    engine.learn(VOCABULARY)
    for i, value in enumerate(SCHEMAS):
        engine.submit(ask(str(i), schema(value), seed=-1, count=400))
    replies = run(engine)
    whole = 0
    for i, value in enumerate(SCHEMAS):
        reply = replies[str(i)]
        if reply.reason == "stop":
            jsonschema.validate(json.loads(answer(reply.tokens)), value)
            whole += 1
    assert whole > 8
    assert sum(reply.end.speculation.rounds for reply in replies.values()) > 3


def test_looking_ahead_changes_nothing_and_stops_where_a_draft_may_not_stand() -> None:
    engine = plain()
    engine.submit(ask("a", schema({"type": "boolean"}), count=10))
    while not engine._rows:
        engine.step()
    constraint = engine._rows[0].constraint
    assert constraint is not None
    true = TOKENS.index(b"true")
    first = constraint.allowed()
    masks = constraint.ahead([TOKENS.index(b"t"), TOKENS.index(b"r"), TOKENS.index(b"x"), true])
    assert len(masks) == 3
    assert masks[0].tolist() == first.tolist() == constraint.allowed().tolist()
    assert not masks[2][TOKENS.index(b"x")]
    # Behind the whole word nothing can follow, so the word is not worth judging: it is drawn.
    assert len(constraint.ahead([true, true])) == 1


LETTERS = [b"a", b"b", b"c", b"d", b"e", b"f", b"<end>"]


def of_three_letters(draws: int) -> tuple[float, int]:
    """Chi-square of a long reply, with its degrees of freedom; half of what is drafted may not stand."""
    target = MarkovModel(vocab=len(LETTERS), seed=2)
    sampler, draft = Sampler(len(LETTERS), 4096), MarkovDraft(target)
    draft.table = mx.array([[2.0, 0, 0, 2, 0, 0, 0]] * len(LETTERS))
    speculator = Speculator(target, sampler, draft, depths=Widths(3, 1))
    engine = Engine(target, sampler, LIMITS, speculator=speculator)
    engine.learn(Vocabulary(tokens=LETTERS, special=[len(LETTERS) - 1]))
    grammar = Grammar(kind="regex", text=f"[abc]{{{2 * draws}}}")
    options = SamplingOptions(temperature=1.0, top_k=0, top_p=1.0)
    engine.submit(Submit(id="a", tokens=[0], max_tokens=draws, stop_tokens=[6], sampling=options, grammar=grammar))
    reply = run(engine)["a"]
    assert reply.end.speculation.rounds > draws // 6
    counts = np.zeros((3, 3))
    np.add.at(counts, ([0, *reply.tokens[:-1]], reply.tokens), 1)
    laws = np.exp(target.table[:3, :3].astype(np.float64))
    each = [chi_square(row, p / p.sum()) for row, p in zip(counts, laws, strict=True)]
    return sum(found for found, _ in each), sum(freedom for _, freedom in each)


def test_sampled_drafts_that_a_grammar_cuts_leave_the_targets_law() -> None:
    assert not improbable(*of_three_letters(1000))


def test_to_draw_afresh_where_a_drawn_draft_may_not_stand_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The power of the test above: a mistake that every reply fits."""
    monkeypatch.setattr(
        "arriero.runner.speculation.speculator.within",
        lambda grammar, proposal, rule: within(grammar, proposal, Rule.SAME),
    )
    assert improbable(*of_three_letters(3000))
