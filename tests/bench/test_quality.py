"""Perplexity and divergence of one model against another."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest

from arriero.bench.quality import LOGIT_ROWS, compare
from arriero.model.contract import Batch, Hidden, Model

VOCAB = 5


class Table:
    """A model whose prediction depends on the last token alone: row i of `logits` stands behind token i."""

    def __init__(self, logits: np.ndarray) -> None:
        self.table = mx.array(logits.astype(np.float32))
        self.facts = SimpleNamespace(vocab_size=logits.shape[1])
        self.chunks: list[tuple[int, int]] = []
        self.rows: list[int] = []

    def new_caches(self) -> list[Any]:
        return [None]

    def forward(self, batch: Batch) -> Hidden:
        self.chunks.append((batch.spans[0].position, batch.spans[0].length))
        return Hidden(self.table[batch.tokens])

    def logits(self, hidden: mx.array) -> mx.array:
        self.rows.append(hidden.shape[0])
        return hidden

    def typed(self) -> Model:
        return cast(Model, self)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    found: np.ndarray = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return found


def draw(count: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(0).integers(0, VOCAB, count).tolist()
    return tokens


def test_a_model_does_not_differ_from_itself() -> None:
    table = np.random.default_rng(1).normal(size=(VOCAB, VOCAB))
    (found,) = compare(Table(table).typed(), [Table(table).typed()], draw(40))
    assert (found.tokens, found.ratio, found.same_likeliest) == (39, 1, 1)
    assert found.mean_divergence == found.largest_divergence == 0


def test_the_figures_are_those_of_the_definitions() -> None:
    tables = np.random.default_rng(1).normal(size=(2, VOCAB, VOCAB))
    tokens = draw(60)
    (found,) = compare(Table(tables[0]).typed(), [Table(tables[1]).typed()], tokens)
    first, second = (log_softmax(table)[tokens[:-1]] for table in tables)
    at = np.arange(59), tokens[1:]
    divergence = (np.exp(first) * (first - second)).sum(-1)
    assert found.reference_perplexity == pytest.approx(np.exp(-first[at].mean()), rel=1e-6)
    assert found.perplexity == pytest.approx(np.exp(-second[at].mean()), rel=1e-6)
    assert found.mean_divergence == pytest.approx(divergence.mean(), rel=1e-5)
    assert found.largest_divergence == pytest.approx(divergence.max(), rel=1e-5)
    assert found.same_likeliest == pytest.approx((first.argmax(-1) == second.argmax(-1)).mean())


def test_each_of_several_candidates_has_the_figures_that_it_has_alone() -> None:
    tables = [Table(table).typed() for table in np.random.default_rng(1).normal(size=(3, VOCAB, VOCAB))]
    together = compare(tables[0], tables[1:], draw(40))
    alone = [compare(tables[0], [other], draw(40))[0] for other in tables[1:]]
    assert [found.figures() for found in together] == [found.figures() for found in alone]


def test_the_text_is_read_in_windows_and_chunks_and_logits_a_few_rows_at_a_time() -> None:
    model = Table(np.zeros((VOCAB, VOCAB)))
    done: list[int] = []
    other = Table(np.zeros((VOCAB, VOCAB))).typed()
    (found,) = compare(model.typed(), [other], draw(50), window=30, chunk=20, progress=done.append)
    assert model.chunks == [(0, 20), (20, 10), (0, 20)]
    assert found.tokens == 29 + 19
    assert max(model.rows) == LOGIT_ROWS
    assert sum(model.rows) == found.tokens
    assert done == [20, 30, 50]


def test_what_stands_before_each_window_is_not_predicted() -> None:
    table = np.random.default_rng(1).normal(size=(VOCAB, VOCAB))
    tokens = draw(50)
    (found,) = compare(Table(table).typed(), [Table(table).typed()], tokens, begin=[3, 4], window=30, chunk=20)
    losses = [
        -log_softmax(table)[a, b] for part in (tokens[:30], tokens[30:]) for a, b in zip([4, *part], part, strict=False)
    ]
    assert found.tokens == 50
    assert found.perplexity == pytest.approx(np.exp(np.mean(losses)), rel=1e-6)


def test_a_token_that_both_rule_out_does_not_count() -> None:
    table = np.zeros((VOCAB, VOCAB))
    table[:, 4] = -np.inf
    tokens = [token % 4 for token in draw(20)]
    (found,) = compare(Table(table).typed(), [Table(table).typed()], tokens)
    assert found.perplexity == pytest.approx(4)
    assert found.mean_divergence == 0


@pytest.mark.parametrize(("tokens", "window"), [([], 8), ([1], 8), ([1, 2, 3], 1)])
def test_a_text_that_predicts_nothing_is_refused(tokens: Sequence[int], window: int) -> None:
    model = Table(np.zeros((VOCAB, VOCAB))).typed()
    with pytest.raises(ValueError, match="nothing is predicted"):
        compare(model, [model], tokens, window=window)


def test_models_of_different_vocabularies_are_refused() -> None:
    with pytest.raises(ValueError, match="vocabularies of 5 and 6"):
        compare(Table(np.zeros((5, 5))).typed(), [Table(np.zeros((6, 6))).typed()], [1, 2])
