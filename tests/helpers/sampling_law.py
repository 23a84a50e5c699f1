"""The law of one draw, written in numpy from the documented order of the transforms."""

from __future__ import annotations

import numpy as np

from arriero.runner.messages import SamplingOptions


def law(logits: np.ndarray, options: SamplingOptions, history: list[int], context: int = 4096) -> np.ndarray:
    """Probabilities `[vocab]` float64 of the next token."""
    scores = np.array(logits, np.float64)
    window = context if options.repeat_last_n < 0 else min(options.repeat_last_n, context)
    seen = history[-window:] if window else []
    repeat = options.repeat_penalty if options.repeat_penalty > 0 else 1.0
    for token in set(seen):
        scores[token] = scores[token] * repeat if scores[token] < 0 else scores[token] / repeat
        scores[token] -= options.presence_penalty + options.frequency_penalty * seen.count(token)
    if options.temperature <= 0:
        return np.eye(len(scores))[int(np.argmax(scores))]
    ranked = np.argsort(-scores, kind="stable")
    if 0 < options.top_k < len(scores):
        scores[ranked[options.top_k :]] = -np.inf
    weights = np.exp((scores - scores.max()) / options.temperature)
    probs = weights / weights.sum()
    if 0 < options.typical_p < 1:
        alive = probs > 0
        surprise = np.full(len(probs), np.inf)
        surprise[alive] = -np.log(probs[alive])
        entropy = (probs[alive] * surprise[alive]).sum()
        probs = leading(probs, np.argsort(np.abs(surprise - entropy), kind="stable"), options.typical_p)
        probs /= probs.sum()
    if 0 < options.top_p < 1:
        probs = leading(probs, np.argsort(-probs, kind="stable"), options.top_p)
    if 0 < options.min_p <= 1:
        probs = np.where(probs < probs.max() * options.min_p, 0.0, probs)
    return probs / probs.sum()


def leading(probs: np.ndarray, order: np.ndarray, mass: float) -> np.ndarray:
    kept = np.zeros_like(probs)
    total = 0.0
    for token in order:
        if total >= mass:
            break
        kept[token] = probs[token]
        total += probs[token]
    return kept


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    """Pearson's statistic over the tokens that can occur; infinite when an impossible one did."""
    if counts[probs == 0].any():
        return float("inf")
    possible = probs > 0
    expected = counts.sum() * probs[possible]
    return float(((counts[possible] - expected) ** 2 / expected).sum())
