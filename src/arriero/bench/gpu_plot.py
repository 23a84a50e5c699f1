"""What `arriero bench gpu` found, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from arriero.bench.gpu import ModelRun, Report
from arriero.bench.gpu_drafts import Rounds
from arriero.bench.gpu_flash_next import FlashNext
from arriero.bench.gpu_kernels import Measured
from arriero.errors import InvalidRequest

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _MIDDLE, _PALE = "#1f4e79", "#5b8db8", "#b9cfe3"
WIDTH = 0.27


def plot(report: Report, path: Path) -> None:
    """Write the picture as PNG; raises InvalidRequest when the file cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    flash_next = report.flash_next
    panels = [report.kernels, report.models, report.models, report.served, flash_next]
    heights = [max(2.0, 0.22 * len(report.kernels)), 2.8, 2.8, 2.8, 2.0]
    kept = [height for height, there in zip(heights, panels, strict=True) if there]
    figure = Figure(figsize=(10, sum(kept) + 1), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(
        f"{report.device}: copy {report.copy / 1e9:.0f} GB/s, bfloat16 products {report.products / 1e12:.0f} TFLOP/s"
    )
    grid: Any = figure.add_gridspec(len(kept), 1, height_ratios=kept)
    cells = iter(range(len(kept)))
    if report.kernels:
        _kernels(figure.add_subplot(grid[next(cells)]), report.kernels)
    if report.models:
        _speeds(figure.add_subplot(grid[next(cells)]), report.models)
        _shares(figure.add_subplot(grid[next(cells)]), report.models)
    if report.served:
        _served(figure.add_subplot(grid[next(cells)]), report)
    if flash_next is not None:
        _flash_next(figure.add_subplot(grid[next(cells)]), flash_next)
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise InvalidRequest(f"--plot {path} cannot be written: {error.strerror or error}") from error


def _kernels(axes: Axes, kernels: list[Measured]) -> None:
    """Shares of the copy rate, or of the bfloat16 product's."""
    names = [f"{k.operation}, {k.shape}, {k.rows} row{'s' if k.rows > 1 else ''}" for k in kernels]
    colours = [_INK if k.unit == "GB/s" else _MIDDLE for k in kernels]
    axes.barh(np.arange(len(kernels)), [100 * k.share for k in kernels], color=colours)
    axes.set_yticks(np.arange(len(kernels)), names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("% of the copy rate (dark), of the bfloat16 product (light)")
    axes.grid(visible=True, axis="x", alpha=0.3)


def _speeds(axes: Axes, models: dict[str, ModelRun]) -> None:
    """Decoded tokens a second of one row: ours, in rounds of drafts, mlx-lm's."""
    runs = list(models.values())
    lm = [np.nan if isinstance(run.mlx_lm, str) else 1 / run.mlx_lm.step for run in runs]
    drafts = [run.drafts.speed if isinstance(run.drafts, Rounds) else np.nan for run in runs]
    _bars(
        axes,
        list(models),
        [("one row", [run.one.total for run in runs]), ("rounds of drafts, 5 right", drafts), ("mlx-lm, one row", lm)],
    )
    axes.set_ylabel("tokens/s")


def _shares(axes: Axes, models: dict[str, ModelRun]) -> None:
    """Of the time that the bytes of a step take at the copy rate."""
    runs = list(models.values())
    parts = [
        ("one row", [100 * run.shares.one for run in runs]),
        ("eight rows", [100 * run.shares.eight for run in runs]),
        ("eight tokens of a row", [100 * run.shares.verify for run in runs]),
    ]
    _bars(axes, list(models), parts)
    axes.set_ylabel("% of the bandwidth limit")


def _served(axes: Axes, report: Report) -> None:
    """New tokens a second of all requests together, as the client counts them."""
    names = list(report.served)
    counts = sorted({speed.parallel for found in report.served.values() for speed in found})
    parts = []
    for count in counts:
        values = [
            next((speed.streamed * count for speed in report.served[name] if speed.parallel == count), np.nan)
            for name in names
        ]
        parts.append((f"{count} request{'s' if count > 1 else ''}", values))
    _bars(axes, names, parts)
    axes.set_ylabel("streamed tokens/s")


def _flash_next(axes: Axes, found: FlashNext) -> None:
    """A chunk of a long prompt with the kernels for blocks of keys, and with plain MLX in their place."""
    chunks = {"kernels": found.ours} | ({} if found.plain is None else {"plain MLX": found.plain})
    bars = axes.barh(list(chunks), [chunk.seconds for chunk in chunks.values()], color=_INK)
    axes.bar_label(bars, [f"{chunk.bytes / 2**30:.1f} GiB besides" for chunk in chunks.values()], fontsize=7)
    axes.margins(x=0.15)
    axes.set_xlabel(f"seconds of 2048 tokens near the end of {found.prompt} (Flash Next, {found.layers} layers)")


def _bars(axes: Axes, names: list[str], parts: list[tuple[str, list[float]]]) -> None:
    at = np.arange(len(names))
    for index, ((label, values), colour) in enumerate(zip(parts, (_INK, _MIDDLE, _PALE), strict=False)):
        bars = axes.bar(
            at + (index - (len(parts) - 1) / 2) * WIDTH, np.nan_to_num(values), WIDTH, color=colour, label=label
        )
        axes.bar_label(bars, ["" if np.isnan(value) else f"{value:.0f}" for value in values], fontsize=7)
    axes.set_xticks(at, names, fontsize=8)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.margins(y=0.3)
    axes.legend(fontsize=8, ncols=len(parts), loc="upper right")
    axes.grid(visible=True, axis="y", alpha=0.3)
