"""Whether counts could come from a law."""

from __future__ import annotations

import math

import numpy as np


def chi_square(counts: np.ndarray, probs: np.ndarray) -> tuple[float, int]:
    """Statistic and degrees of freedom, cells of few expected draws pooled; infinite for an impossible draw."""
    if counts[probs == 0].any():
        return math.inf, 1
    expected = counts.sum() * probs
    few = (expected < 8) & (probs > 0)
    cells = [(c, e) for c, e in zip(counts[~few], expected[~few], strict=True) if e > 0]
    if expected[few].sum() >= 8:
        cells.append((counts[few].sum(), expected[few].sum()))
    return float(sum((c - e) ** 2 / e for c, e in cells)), max(len(cells) - 1, 1)


def improbable(statistic: float, freedom: int) -> bool:
    """Whether a chi-square value is above what one in about a million reaches (Wilson and Hilferty 1931)."""
    spread = 2 / (9 * freedom)
    return statistic > freedom * (1 - spread + 4.75 * math.sqrt(spread)) ** 3


def p_value(statistic: float, freedom: int) -> float:
    """Probability of a value as large, by the same approximation."""
    if statistic == math.inf:
        return 0.0
    spread = 2 / (9 * freedom)
    return 0.5 * math.erfc(((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(2 * spread))
