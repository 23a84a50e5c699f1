"""Drafts under a grammar: what is judged, and that the law of what is said stays the target's."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest

from arriero.runner.sampling import Distribution
from arriero.runner.speculation.fitting import within
from arriero.runner.speculation.verify import Proposal, Rule, chances, replacement

VOCAB = 6
RNG = np.random.default_rng(4)
TARGET = RNG.dirichlet(np.ones(VOCAB))
DRAFT = RNG.dirichlet(np.ones(VOCAB))


class Words:
    """A grammar of one word: the tokens that each place may hold; where there are no more places it is whole."""

    def __init__(self, *places: Sequence[int], ends_with: Sequence[int] = ()) -> None:
        self.places = [np.isin(np.arange(VOCAB), place) for place in places]
        self.ends_with = ends_with

    def ahead(self, drafts: Sequence[int]) -> list[np.ndarray]:
        masks = []
        for place, draft in zip(self.places, drafts, strict=False):
            masks.append(place)
            if not place[draft] or draft in self.ends_with:
                return masks
        return masks if len(drafts) >= len(self.places) else [*masks, self.places[len(drafts)]]


def proposed(*drafts: int, law: bool = True) -> Proposal:
    rows = Distribution(mx.array(np.tile(DRAFT, (len(drafts), 1)).astype(np.float32)), None, VOCAB)
    return Proposal(mx.array(drafts, mx.int32), rows if law else None)


def said_first(grammar: Words, masked: np.ndarray) -> np.ndarray:
    """The law of the first token of a round of one draft, summed over what may have been drafted."""
    total = np.zeros(VOCAB)
    for draft, chance in enumerate(DRAFT):
        found = within(grammar, proposed(draft), Rule.RATIO)
        assert found is not None
        assert found.law is not None
        assert found.allowed is not None
        probs = mx.where(found.allowed, mx.array(TARGET.astype(np.float32)), 0.0)
        target = Distribution(probs / probs.sum(axis=-1, keepdims=True), None, VOCAB)
        assert np.allclose(np.array(target.probs[0]), masked, atol=1e-6)
        kept = min(1.0, float(np.array(chances(target[:1], found.law, found.tokens))[0]))
        total += chance * (kept * np.eye(VOCAB)[draft] + (1 - kept) * np.array(replacement(target, found.law).probs[0]))
    return total


@pytest.mark.parametrize(
    "grammar",
    [
        Words([0, 2, 3], [1, 4]),
        Words([5], [1]),
        Words([0, 2, 3], [1, 4], ends_with=[2]),
        Words([0, 1, 2, 3, 4, 5]),
    ],
    ids=["goes on", "one token", "one token ends it", "every token ends it"],
)
def test_under_a_grammar_a_drawn_draft_leaves_the_targets_law(grammar: Words) -> None:
    masked = np.where(grammar.places[0], TARGET, 0.0)
    masked /= masked.sum()
    assert np.abs(said_first(grammar, masked) - masked).max() < 1e-6


def test_a_drawn_draft_that_may_not_stand_is_judged_and_has_no_chance() -> None:
    found = within(Words([0, 1], [1, 2], [3]), proposed(1, 5, 3), Rule.RATIO)
    assert found is not None
    assert found.host == [1, 5]
    assert not found.ends
    assert found.allowed is not None
    allowed = np.array(found.allowed)
    assert allowed.shape == (3, VOCAB)
    assert not allowed[1, 5]


def test_a_drawn_draft_that_ends_the_reply_is_judged_and_nothing_is_said_behind_it() -> None:
    found = within(Words([0, 1], [1, 2]), proposed(1, 2), Rule.RATIO)
    assert found is not None
    assert found.host == [1, 2]
    assert found.ends


@pytest.mark.parametrize("rule", [Rule.BEST, Rule.SAME])
def test_drafts_that_decide_nothing_are_cut_before_the_first_that_may_not_stand(rule: Rule) -> None:
    words = Words([0, 1], [1, 2], [3])
    found = within(words, proposed(1, 5, 3, law=False), rule)
    assert found is not None
    assert (found.host, found.ends) == ([1], False)
    assert within(words, proposed(5, 1, law=False), rule) is None


def test_a_reply_that_cannot_go_on_has_nothing_to_judge() -> None:
    assert within(Words(), proposed(1, 2), Rule.RATIO) is None
