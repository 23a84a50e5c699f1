"""A comparison as a picture: divergences of single tokens, where in the text they are, and errors of weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from arriero.bench.compared import Comparison
from arriero.errors import InvalidRequest

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMOOTH = 64
"""Tokens of the running mean along the text."""
_INK, _PALE = "#1f4e79", "#9db8d2"


def check_plotting(path: Path) -> None:
    """Raise InvalidRequest, before anything is measured, when a picture could not be drawn or written there."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InvalidRequest(
            "drawing needs matplotlib, which is not installed: pip install 'arriero[plot]', or leave --plot out"
        ) from None
    if path.suffix.lower() != ".png":
        raise InvalidRequest(f"--plot {path}: the picture is a PNG, so its name must end in .png")
    if not path.absolute().parent.is_dir():
        raise InvalidRequest(f"--plot {path}: there is no folder {path.absolute().parent}")


def plot(found: Comparison, path: Path) -> None:
    """Write the picture as PNG; raises InvalidRequest when the file cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups = found.weights.groups
    figure = Figure(figsize=(11, max(5.5, 2.4 + 0.26 * len(groups))), layout="constrained")
    FigureCanvasAgg(figure)
    grid: Any = figure.add_gridspec(2, 2, width_ratios=(1, 1))
    quality = found.quality
    figure.suptitle(
        f"{found.candidate} against {found.reference}: perplexity {quality.perplexity:.3f} "
        f"({100 * (quality.ratio - 1):+.2f} %), mean KL {quality.mean_divergence:.2e} nats",
        fontsize=11,
    )
    # A token that only the candidate rules out has an infinite one, for which there is no place.
    divergences = np.where(np.isfinite(quality.predictions.divergences), quality.predictions.divergences, np.nan)
    _distribution(figure.add_subplot(grid[0, 0]), divergences[~np.isnan(divergences)])
    _course(figure.add_subplot(grid[1, 0]), divergences)
    _weights(figure.add_subplot(grid[:, 1]), found)
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise InvalidRequest(f"--plot {path} cannot be written: {error.strerror or error}") from error


def _distribution(axes: Axes, divergences: np.ndarray) -> None:
    """Share of tokens whose divergence is larger, both axes logarithmic."""
    values = np.sort(np.maximum(divergences, 1e-9))
    share = 1 - np.arange(len(values)) / max(1, len(values))
    axes.loglog(values, share, color=_INK)
    axes.set_xlabel("KL of a token (nats)")
    axes.set_ylabel("share of tokens above")
    axes.grid(visible=True, which="major", alpha=0.3)


def _course(axes: Axes, divergences: np.ndarray) -> None:
    axes.plot(divergences, color=_PALE, linewidth=0.6, label="token")
    width = min(SMOOTH, len(divergences))
    smooth = np.convolve(divergences, np.full(width, 1 / width), mode="valid")
    axes.plot(np.arange(len(smooth)) + (width - 1) / 2, smooth, color=_INK, label=f"mean of {width}")
    axes.set_xlabel("token of the text")
    axes.set_ylabel("KL (nats)")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper right", fontsize=8)


def _weights(axes: Axes, found: Comparison) -> None:
    groups = found.weights.groups[::-1]
    axes.barh(np.arange(len(groups)), [100 * group.error for group in groups], color=_INK)
    labels = [f"{group.name.removeprefix('model.').removesuffix('.weight')}  {group.candidate}" for group in groups]
    axes.set_yticks(np.arange(len(groups)), labels, fontsize=8)
    axes.set_xlabel(f"weight error (%), all together {100 * found.weights.error:.2f} %")
    axes.grid(visible=True, axis="x", alpha=0.3)
