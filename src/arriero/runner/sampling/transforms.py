"""From logits to the distribution that a token is drawn from.

The order is fixed: penalties on raw scores → top-k → temperature and softmax in float32 → typical-p → top-p → min-p →
renormalise. Each stage acts on what the one before left. Typical-p stands before top-p, where llama.cpp has it: it
judges a token by the entropy of the distribution, which top-p and min-p would already have cut.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx

from arriero.errors import InvalidRequest
from arriero.kernels.topk import argmax, top_k_values
from arriero.runner.messages import SamplingOptions
from arriero.runner.sampling.distribution import Distribution, normalised

COLDEST = 1e-30
"""Temperatures below are greedy: in float32, scores divided by them would be infinite."""


@dataclass(frozen=True, slots=True)
class Rules:
    """A row's options with everything that is switched off brought to one spelling."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    window: int
    """Tokens that penalties look back on; 0 = no penalty is active."""
    repeat: float
    presence: float
    frequency: float

    @property
    def shape(self) -> tuple[bool, int, bool, bool, bool]:
        """What decides which operations run; rows of one shape are transformed together."""
        greedy = self.temperature == 0
        if greedy:
            return True, 0, False, False, False
        return False, self.top_k, self.typical_p < 1, self.top_p < 1, self.min_p > 0


def rules(options: SamplingOptions, vocab_size: int, context_length: int) -> Rules:
    """The rules of a row; raises InvalidRequest for a number that is not finite."""
    for name in (
        "temperature",
        "top_p",
        "min_p",
        "typical_p",
        "repeat_penalty",
        "presence_penalty",
        "frequency_penalty",
    ):
        if not math.isfinite(getattr(options, name)):
            raise InvalidRequest(f"option {name} must be a finite number; it is {getattr(options, name)}")
    repeat = options.repeat_penalty if options.repeat_penalty > 0 else 1.0
    penalised = repeat != 1 or options.presence_penalty != 0 or options.frequency_penalty != 0
    window = context_length if options.repeat_last_n < 0 else options.repeat_last_n
    return Rules(
        temperature=options.temperature if options.temperature >= COLDEST else 0.0,
        top_k=options.top_k if 0 < options.top_k < vocab_size else 0,
        top_p=options.top_p if 0 < options.top_p < 1 else 1.0,
        min_p=options.min_p if 0 < options.min_p <= 1 else 0.0,
        typical_p=options.typical_p if 0 < options.typical_p < 1 else 1.0,
        window=min(window, context_length) if penalised else 0,
        repeat=repeat,
        presence=options.presence_penalty,
        frequency=options.frequency_penalty,
    )


class Parameters:
    """The numbers of several rows with rules of one shape, as columns `[n, 1]` float32; None where a stage is off."""

    def __init__(self, rows: list[Rules]) -> None:
        first = rows[0]
        self.greedy, self.top_k, typical, top, least = first.shape
        self.window = max(row.window for row in rows)
        self.temperature = None if self.greedy else _column([row.temperature for row in rows])
        self.typical_p = _column([row.typical_p for row in rows]) if typical else None
        self.top_p = _column([row.top_p for row in rows]) if top else None
        self.min_p = _column([row.min_p for row in rows]) if least else None
        self.repeat = _column([row.repeat for row in rows]) if self.window else None
        self.presence = _column([row.presence for row in rows]) if self.window else None
        frequency = [row.frequency for row in rows]
        self.frequency = _column(frequency) if self.window and any(frequency) else None


def _column(values: list[float]) -> mx.array:
    return mx.array(values, mx.float32)[:, None]


def penalise(scores: mx.array, history: mx.array, parameters: Parameters) -> mx.array:
    """Scores `[n, vocab]` float32 with the penalties of the tokens in `history` `[n, window]` int32 (−1 = no token).

    The repeat factor and the presence are applied once for each token that occurs, the frequency for each occurrence.
    """
    if parameters.repeat is None or parameters.presence is None:
        return scores
    counts = (history >= 0) & (history < scores.shape[-1])
    # A slot without a token repeats the greatest one: writing a value twice changes nothing.
    some = mx.max(mx.where(counts, history, 0), axis=-1, keepdims=True)
    tokens = mx.where(counts, history, some)
    found = mx.take_along_axis(scores, tokens, axis=-1)
    changed = mx.where(found < 0, found * parameters.repeat, found / parameters.repeat) - parameters.presence
    changed = mx.where(mx.any(counts, axis=-1, keepdims=True), changed, found)
    scores = mx.put_along_axis(scores, tokens, changed, axis=-1)
    if parameters.frequency is not None:
        rows = mx.arange(scores.shape[0])[:, None]
        scores = scores.at[rows, tokens].subtract(parameters.frequency * counts)
    return scores


def distribution(scores: mx.array, parameters: Parameters) -> Distribution:
    """The distribution of rows whose scores `[n, vocab]` float32 carry their penalties already."""
    if parameters.temperature is None:
        best = argmax(scores)[..., None].astype(mx.int32)
        return Distribution(mx.ones(best.shape, mx.float32), best, scores.shape[-1])
    vocab_size = scores.shape[-1]
    ids: mx.array | None = None
    if parameters.top_k:
        scores, ids = top_k_values(scores, parameters.top_k)
    probs = mx.softmax(scores / parameters.temperature, axis=-1, precise=True)
    if parameters.typical_p is not None:
        probs = normalised(typical(probs, parameters.typical_p))
    if parameters.top_p is not None:
        probs = nucleus(probs, parameters.top_p, descending=ids is not None)
    if parameters.min_p is not None:
        least = mx.max(probs, axis=-1, keepdims=True) * parameters.min_p
        probs = probs * (probs >= least)
    return Distribution(normalised(probs), ids, vocab_size)


def nucleus(probs: mx.array, top_p: mx.array, descending: bool) -> mx.array:
    """Probabilities `[n, m]` with those outside the smallest leading set of mass `top_p` `[n, 1]` zeroed.

    A token stays while the mass before it is below `top_p`, so at least one stays. `descending`: they are in order (but
    for zeros, which have no mass).
    """
    if descending:
        return probs * (_mass_before(probs) < top_p)
    return _leading(probs, mx.argsort(-probs, axis=-1), top_p)


def typical(probs: mx.array, typical_p: mx.array) -> mx.array:
    """Probabilities outside the locally typical set zeroed: it holds the tokens whose surprise is nearest the entropy.

    Locally typical sampling, Meister et al. 2022 (arXiv:2202.00666).
    """
    surprise = -mx.log(mx.maximum(probs, 1e-38))
    entropy = mx.sum(probs * surprise, axis=-1, keepdims=True)
    return _leading(probs, mx.argsort(mx.abs(surprise - entropy), axis=-1), typical_p)


def _leading(probs: mx.array, order: mx.array, mass: mx.array) -> mx.array:
    ordered = mx.take_along_axis(probs, order, axis=-1)
    return mx.put_along_axis(mx.zeros_like(probs), order, ordered * (_mass_before(ordered) < mass), axis=-1)


def _mass_before(probs: mx.array) -> mx.array:
    return mx.cumsum(probs, axis=-1, inclusive=False)
