"""Sampled four-token replies of the engine, with the scores of every kind of draft, against the law of plain decoding.

Forwards are looked up (`tests/helpers/memoised.py`); the engine, its rules, the draft's choices and their law are real.
`-m slow` draws 20,000 replies of each kind and transform and prints their p; a part with 400 always runs.

Power: with δ = Σ (p' − p)² / p of what is compared, a wrong law p' is rejected in 99 of 100 runs from δ = 0.24 on with
400 draws (22 degrees of freedom), from 0.014 on with 20,000 (500). The mistake planted below has about 0.2.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import cache

import numpy as np
import pytest

from arriero.runner.engine import Engine
from arriero.runner.messages import SamplingOptions
from arriero.runner.sampling import Distribution
from arriero.runner.speculation import verify
from tests.helpers.chi_square import chi_square, improbable, p_value
from tests.helpers.draft_cases import KINDS, pair, prompt_for
from tests.helpers.engine_runs import collect, submit
from tests.helpers.memoised import MemoisedDraft, MemoisedModel
from tests.helpers.sampling_law import law
from tests.helpers.speculation import speculating

PLAIN = {"top_k": 0, "top_p": 1.0}
CONFIGURATIONS = {
    "temperature": {**PLAIN, "temperature": 1.3},
    "top-k": {"temperature": 1.0, "top_k": 3, "top_p": 1.0},
    "top-p": {"temperature": 1.0, "top_k": 0, "top_p": 0.8},
    "min-p": {**PLAIN, "temperature": 1.0, "min_p": 0.15},
    "penalties": {
        **PLAIN,
        "temperature": 1.0,
        "repeat_last_n": 3,
        "repeat_penalty": 1.5,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
    },
}
LOOKUP = "lookup"
LENGTH = 4
DRAWS = 400
ENOUGH = 40
"""Draws behind a text that are worth comparing."""


@pytest.fixture(autouse=True)
def seeds(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The same draws in every run, though nobody asked for a seed; others in every test."""
    numbers = random.Random(request.node.name)
    monkeypatch.setattr("arriero.runner.sampling.sampler.fresh_seed", lambda: numbers.getrandbits(64))


@cache
def target_and_draft(kind: str) -> tuple[MemoisedModel, MemoisedDraft | None, list[int]]:
    """A model that says five tokens, its draft, and a prompt."""
    name = "mtp_qwen3_5" if kind == LOOKUP else kind
    model, draft = pair(name)
    target = MemoisedModel(model, [3, 17, 40, 64, 101])
    if kind == LOOKUP:
        return target, None, [3, 17, 40, 64, 101, 3, 17, 40, 64, 101, 3, 17, 40]
    return target, MemoisedDraft(target, draft), prompt_for(name)


def drawn(kind: str, options: SamplingOptions, draws: int) -> tuple[Counter, float]:
    """Replies of an engine that drafts, counted, and the part of drafts that stayed."""
    target, draft, prompt = target_and_draft(kind)
    engine: Engine = speculating(target, draft=draft, widths=(3, 2))
    found: Counter = Counter()
    for i in range(draws):
        engine.submit(submit(str(i), prompt, LENGTH, sampling=options))
        while engine.busy:
            engine.step()
        found[tuple(collect(engine)[str(i)].tokens)] += 1
    counts = engine.counts()
    assert counts.draft_rounds >= draws
    return found, counts.drafts_accepted / counts.drafts_judged


def wanted(kind: str, options: SamplingOptions) -> dict[tuple[int, ...], float]:
    """The law of plain decoding, every reply."""
    target, _, prompt = target_and_draft(kind)
    laws: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        grown = {}
        for tail, chance in laws.items():
            probs = law(target.row((*prompt, *tail)), options, [*prompt, *tail])
            for token in np.flatnonzero(probs):
                grown[(*tail, int(token))] = chance * float(probs[token])
        laws = grown
    return laws


def report(what: str, statistic: float, freedom: int) -> None:
    print(f"{what}: chi² {statistic:.1f} of {freedom}, p = {p_value(statistic, freedom):.3f}")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("kind", [LOOKUP, *KINDS])
def test_20000_replies_of_four_tokens_follow_the_targets_law(kind: str, name: str) -> None:
    """S08."""
    options = SamplingOptions(**CONFIGURATIONS[name])
    found, stayed = drawn(kind, options, 20_000)
    assert 0.02 < stayed < 0.98
    laws = wanted(kind, options)
    assert set(found) <= set(laws)
    keys = sorted(laws)
    statistic, freedom = chi_square(np.array([found[key] for key in keys]), np.array([laws[key] for key in keys]))
    report(f"{kind}, {name}, {stayed:.2f} stayed", statistic, freedom)
    assert not improbable(statistic, freedom)


def by_place(kind: str, options: SamplingOptions, draws: int) -> tuple[float, int]:
    """Chi-square of each token given those before it, summed: more power where draws are few."""
    found, stayed = drawn(kind, options, draws)
    assert 0.02 < stayed < 0.98
    target, _, prompt = target_and_draft(kind)
    counts: dict[tuple[int, ...], Counter] = {}
    for reply, times in found.items():
        for i, token in enumerate(reply):
            counts.setdefault(reply[:i], Counter())[token] += times
    statistic, freedom = 0.0, 0
    for tail, row in counts.items():
        if row.total() < ENOUGH:
            continue
        probs = law(target.row((*prompt, *tail)), options, [*prompt, *tail])
        each, more = chi_square(np.array([row[token] for token in range(len(probs))]), probs)
        statistic, freedom = statistic + each, freedom + more
    report(f"{kind}, {stayed:.2f} stayed", statistic, freedom)
    return statistic, freedom


PENALTIES = SamplingOptions(**CONFIGURATIONS["penalties"])


@pytest.mark.parametrize("kind", ["mtp_qwen3_5", "dflash2"])
def test_replies_of_four_tokens_follow_the_targets_law(kind: str) -> None:
    """One of each form of a draft's law."""
    assert not improbable(*by_place(kind, PENALTIES, DRAWS))


def afresh(target: Distribution, law: Distribution) -> Distribution:
    """A mistake: what stands in for a draft is drawn as if nothing had been drafted."""
    return target


def test_a_mistake_in_what_stands_in_for_a_draft_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The power of the test above."""
    monkeypatch.setattr(verify, "replacement", afresh)
    assert improbable(*by_place("mtp_qwen3_5", PENALTIES, DRAWS))
