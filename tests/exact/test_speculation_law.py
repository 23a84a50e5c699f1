"""Sampled replies of the whole engine with drafts are distributed as the plain loop's."""

from __future__ import annotations

import os
from collections import Counter

import numpy as np
import pytest

from arriero.runner.messages import SamplingOptions
from tests.helpers.chi_square import chi_square, improbable
from tests.helpers.engine_runs import run, submit
from tests.helpers.markov import MarkovDraft, MarkovModel
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
        "repeat_last_n": 2,
        "repeat_penalty": 1.5,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
    },
}
TOKENS = int(os.environ.get("LAW_TOKENS", "1500"))
"""Of a long reply; every token is a draw of its own, given the two before it. 20,000 take a minute each."""


def conditionals(tokens: list[int]) -> dict[tuple[int, int], Counter]:
    """What followed each pair of tokens."""
    found: dict[tuple[int, int], Counter] = {}
    for a, b, c in zip(tokens, tokens[1:], tokens[2:], strict=False):
        found.setdefault((a, b), Counter())[c] += 1
    return found


@pytest.mark.parametrize("candidates", [0, 4], ids=["all scores", "candidates"])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_long_sampled_reply_follows_the_targets_law(name: str, candidates: int) -> None:
    """R-59: unseeded rows are judged by ratio, so nothing but the law can be compared."""
    model = MarkovModel(seed=4)
    engine = speculating(model, draft=MarkovDraft(model, candidates=candidates), widths=(3, 3, 1, 5, 0))
    options = SamplingOptions(**CONFIGURATIONS[name])
    engine.submit(submit("a", [2, 0], TOKENS, sampling=options))
    reply = run(engine)["a"]
    used = reply.end.speculation
    assert 0.2 < used.accepted / used.drafted < 0.98
    statistic, freedom = 0.0, 0
    for (a, b), counts in conditionals([2, 0, *reply.tokens]).items():
        wanted = law(model.table[b], options, [a, b])
        each, more = chi_square(np.array([counts[token] for token in range(len(wanted))]), wanted)
        statistic, freedom = statistic + each, freedom + more
    assert freedom > 10
    assert not improbable(statistic, freedom)


def test_a_seed_gives_the_same_text_whatever_is_drafted() -> None:
    """R-84."""
    model = MarkovModel(seed=4)
    options = SamplingOptions(temperature=1.1, top_k=4, seed=9)
    said = []
    for widths, candidates in (((0,), 0), ((1,), 0), ((5, 2), 0), ((3,), 4)):
        engine = speculating(model, draft=MarkovDraft(model, candidates=candidates), widths=widths)
        engine.submit(submit("a", [2, 0], 300, sampling=options))
        said.append(run(engine)["a"].tokens)
    assert all(each == said[0] for each in said)
