"""What ways of computing a model cost in quality, measured against one of them over a text.

Perplexity says whether a text became less likely; the divergence of the next token's distribution finds differences
that perplexity averages out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import mlx.core as mx
import numpy as np

from arriero.model.contract import Batch, Model, Span

LOGIT_ROWS = 8
"""Rows of one head product: as few as decoding has, since prefill computes no logits."""


@dataclass(frozen=True, slots=True, eq=False)
class Predictions:
    """Each predicted token's figures, float64 `[tokens]`, in the order of the text."""

    reference_losses: np.ndarray
    """Minus the logarithm of the probability that the reference gave the token, in nats."""
    losses: np.ndarray
    divergences: np.ndarray
    same: np.ndarray
    """1 where both find the same token likeliest."""


@dataclass(frozen=True, slots=True)
class Quality:
    """Figures of the predictions of a text; divergences are KL(reference ‖ candidate) in nats per token."""

    predictions: Predictions
    tokens: int
    """Predicted tokens."""
    reference_perplexity: float
    perplexity: float
    mean_divergence: float
    largest_divergence: float
    high_divergence: float
    """The 99th percentile, one of the values."""
    same_likeliest: float
    """Share of the tokens for which both find the same one likeliest."""

    @property
    def ratio(self) -> float:
        """Perplexity of the candidate over that of the reference."""
        return self.perplexity / self.reference_perplexity

    @classmethod
    def of(cls, found: Predictions) -> Quality:
        """The figures of a text's predictions."""
        return cls(
            predictions=found,
            tokens=len(found.losses),
            reference_perplexity=float(np.exp(found.reference_losses.mean())),
            perplexity=float(np.exp(found.losses.mean())),
            mean_divergence=float(found.divergences.mean()),
            largest_divergence=float(found.divergences.max()),
            high_divergence=float(np.quantile(found.divergences, 0.99, method="higher")),
            same_likeliest=float(found.same.mean()),
        )

    def figures(self) -> dict[str, float]:
        """All but the single predictions, and the ratio."""
        names = [field.name for field in fields(self) if field.name != "predictions"]
        return {name: getattr(self, name) for name in names} | {"ratio": self.ratio}


def compare(
    reference: Model,
    candidates: Sequence[Model],
    tokens: Sequence[int],
    *,
    begin: Sequence[int] = (),
    window: int = 2048,
    chunk: int = 512,
    progress: Callable[[int], None] = lambda _: None,
) -> list[Quality]:
    """All models read `tokens` in windows of their own context, in chunks of `chunk`, as the engine reads a prompt.

    `begin` stands before each window and is not predicted: a model that was trained with a token for the beginning
    is another without it. Without `begin` the first token of a window is not predicted. ValueError when none is, or
    when two have different vocabularies. Nothing larger than a few rows of logits is held.
    """
    models = [reference, *candidates]
    for other in candidates:
        if reference.facts.vocab_size != other.facts.vocab_size:
            raise ValueError(
                f"vocabularies of {reference.facts.vocab_size} and {other.facts.vocab_size} tokens cannot be compared"
            )
    if len(tokens) < 2 or window < 2:
        raise ValueError(f"{len(tokens)} tokens in windows of {window}: nothing is predicted")
    windows = [[*begin, *tokens[at : at + window]] for at in range(0, len(tokens), window)]
    given = max(len(begin), 1)
    found: list[list[np.ndarray]] = [[] for _ in candidates]
    done = 0
    for ids in windows:
        caches = [model.new_caches() for model in models]
        for at in range(0, len(ids) - 1, chunk):
            part = ids[at : at + chunk]
            states = [
                model.forward(Batch(mx.array(part, mx.int32), [Span(0, len(part), at, held)])).final
                for model, held in zip(models, caches, strict=True)
            ]
            mx.eval(
                states, [array for held in caches for cache in held if cache is not None for array in cache.state()]
            )
            for row in range(max(given - 1 - at, 0), len(part), LOGIT_ROWS):
                wanted = np.array(ids[at + row + 1 : at + min(row + LOGIT_ROWS, len(part)) + 1])
                if not wanted.size:
                    break
                first, *others = (
                    _log_probabilities(model, hidden[row : row + len(wanted)])
                    for model, hidden in zip(models, states, strict=True)
                )
                for rows, second in zip(found, others, strict=True):
                    rows.append(_rows(first, second, wanted))
            done += len(part)
            progress(done)
    return [Quality.of(Predictions(*np.concatenate(rows, axis=1))) for rows in found]


def _log_probabilities(model: Model, hidden: mx.array) -> np.ndarray:
    """Float32 `[n, vocab]`; the sum is taken in float64."""
    logits = np.array(model.logits(hidden).astype(mx.float32))
    logits -= logits.max(axis=-1, keepdims=True)
    totals = np.log(np.exp(logits).sum(axis=-1, keepdims=True, dtype=np.float64))
    normed: np.ndarray = logits - totals.astype(np.float32)
    return normed


def _rows(first: np.ndarray, second: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """`[4, n]`: both losses, the divergence, and 1 where the likeliest token is the same."""
    at = np.arange(len(wanted))
    # A token that the reference rules out adds nothing; one that only the candidate does makes it infinite.
    gap = np.subtract(first, second, where=np.isfinite(first), out=np.zeros_like(first))
    divergence = (np.exp(first) * gap).sum(axis=-1, dtype=np.float64)
    same = first.argmax(axis=-1) == second.argmax(axis=-1)
    return np.stack([-first[at, wanted], -second[at, wanted], divergence, same]).astype(np.float64)
