"""The ratio rule written in numpy, a world small enough to sum over everything, and mistakes that others made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import numpy as np

Row = np.ndarray
"""A law over the vocabulary, `[vocab]` float64."""
Law = dict[tuple[int, ...], float]
Outcomes = Iterator[tuple[tuple[int, ...], float]]
Accept = Callable[[Row, Row, int], float]
"""`accept(p, q, token)`: the chance that a token drawn from q stays."""
Residual = Callable[[Row, Row, int], Row]
"""`residual(p, q, token)`: what to draw from when it does not."""


def accept(p: Row, q: Row, token: int) -> float:
    return min(1.0, float(p[token] / q[token]))


def residual(p: Row, q: Row, token: int) -> Row:
    left = np.maximum(p - q, 0.0)
    total = left.sum()
    return left / total if total > 0 else p


class World:
    """A target whose law depends on the last two tokens, and a proposal that depends on the last one.

    The target rules some tokens out that are proposed, and allows some that never are.
    """

    def __init__(self, seed: int, *, vocab: int = 4, depth: int = 3, sparse: bool = True) -> None:
        rng = np.random.default_rng(seed)
        self.vocab, self.depth = vocab, depth
        self.p = softmax(rng.normal(size=(vocab, vocab, vocab)) / 0.7)
        self.p[rng.random(self.p.shape) < 0.15] = 0.0
        self.p[..., 0] += 1e-3
        self.p /= self.p.sum(-1, keepdims=True)
        self.q = softmax(rng.normal(size=(depth, vocab, vocab)))
        if sparse:
            for place in range(depth):
                self.q[place][:, rng.integers(vocab)] = 0.0
        self.q /= self.q.sum(-1, keepdims=True)

    def target(self, history: tuple[int, ...]) -> Row:
        row: Row = self.p[history[-2], history[-1]]
        return row

    def drafts(self, anchor: int) -> Iterator[tuple[float, tuple[int, ...], list[Row]]]:
        """Every path of drafts, its probability, and the law of each token."""
        for path in product(range(self.vocab), repeat=self.depth):
            rows = [self.q[place, before] for place, before in enumerate((anchor, *path[:-1]))]
            chance = float(np.prod([row[token] for row, token in zip(rows, path, strict=True)]))
            if chance > 0:
                yield chance, path, rows


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    result: np.ndarray = weights / weights.sum(-1, keepdims=True)
    return result


def plain_law(world: World, history: tuple[int, ...], length: int) -> Law:
    """Of the next tokens, one by one."""
    law: Law = {(): 1.0}
    for _ in range(length):
        law = {
            (*seq, token): chance * float(world.target(history + seq)[token])
            for seq, chance in law.items()
            for token in range(world.vocab)
        }
    return law


def ratio_round(world: World, history: tuple[int, ...], accept: Accept, residual: Residual) -> Outcomes:
    """Every outcome of a round, and its probability."""
    for chance, path, rows in world.drafts(history[-1]):
        live = chance
        for i, token in enumerate(path):
            p = world.target(history + path[:i])
            kept = accept(p, rows[i], token)
            if live * (1 - kept) > 0:
                for other, weight in enumerate(residual(p, rows[i], token)):
                    yield (*path[:i], other), live * (1 - kept) * float(weight)
            live *= kept
        for other, weight in enumerate(world.target(history + path)):
            yield (*path, other), live * float(weight)


def same_round(world: World, history: tuple[int, ...]) -> Outcomes:
    """The target draws at every place; what follows its first token that is not the draft is not said."""
    for chance, path, _ in world.drafts(history[-1]):
        live = chance
        for i, token in enumerate(path):
            p = world.target(history + path[:i])
            for other in range(world.vocab):
                if other != token:
                    yield (*path[:i], other), live * float(p[other])
            live *= float(p[token])
        for other, weight in enumerate(world.target(history + path)):
            yield (*path, other), live * float(weight)


def law_of_rounds(
    world: World, history: tuple[int, ...], length: int, one_round: Callable[[tuple[int, ...]], Outcomes]
) -> Law:
    """Of the first `length` tokens, over as many rounds as that takes."""
    going: Law = {(): 1.0}
    done: Law = {}
    while going:
        later: Law = {}
        for seq, chance in going.items():
            for fresh, weight in one_round(history + seq):
                said, both = seq + fresh, chance * weight
                if both == 0:
                    continue
                kept = done if len(said) >= length else later
                kept[said[:length]] = kept.get(said[:length], 0.0) + both
        going = later
    return done


def gap(first: Law, second: Law) -> float:
    """The largest difference of two laws."""
    return max(abs(first.get(key, 0.0) - second.get(key, 0.0)) for key in first.keys() | second.keys())


def always_from_target(p: Row, q: Row, token: int) -> Row:
    """Mistake: what is drawn after a rejection is drawn from p itself."""
    return p


def without_token(p: Row, q: Row, token: int) -> Row:
    """Mistake: a draft that was drawn by chance is taken for one that had to be."""
    left = p.copy()
    left[token] = 0.0
    return left / left.sum() if left.sum() > 0 else p


def by_target_alone(p: Row, q: Row, token: int) -> float:
    """Mistake: as if the draft had been certain."""
    return float(p[token])


def by_larger(p: Row, q: Row, token: int) -> float:
    """Mistake: a draft that the target likes at least as much stays, others never do."""
    return float(p[token] >= q[token])


def with_floor(p: Row, q: Row, token: int) -> Row:
    """Mistake: a little is added to every token before the logarithm."""
    left = np.maximum(p - q, 0.0) + 0.02
    return left / left.sum()


MISTAKES: dict[str, tuple[Accept, Residual]] = {
    "replacement from the target": (accept, always_from_target),
    "replacement without the draft": (accept, without_token),
    "kept by the target's chance": (by_target_alone, residual),
    "kept when likelier": (by_larger, residual),
    "a floor under every token": (accept, with_floor),
}
