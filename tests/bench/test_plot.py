"""The picture of a comparison, and what is said when it can't be drawn."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from arriero.bench.compared import Comparison
from arriero.bench.plot import check_plotting, plot
from arriero.bench.quality import Predictions, Quality
from arriero.bench.weights import WeightError, WeightErrors
from arriero.errors import InvalidRequest


def comparison(tokens: int = 200, infinite: int = 0) -> Comparison:
    rng = np.random.default_rng(0)
    losses = rng.exponential(2, tokens)
    divergences = rng.exponential(0.01, tokens)
    divergences[:infinite] = np.inf
    found = Predictions(losses, losses + 0.01, divergences, np.ones(tokens))
    groups = [
        WeightError(f"model.layers.*.{name}.weight", 4, "BF16", "int4", 100, 30, error, error)
        for name, error in (("mlp.up_proj", 0.09), ("self_attn.q_proj", 0.02))
    ]
    return Comparison("b", "a", 200, 60, "bfloat16", "text", 128, Quality.of(found), WeightErrors(groups, [], [], 0.07))


@pytest.mark.parametrize(("tokens", "infinite"), [(1, 0), (200, 2)])
def test_the_picture_is_a_png(tmp_path: Path, tokens: int, infinite: int) -> None:
    pillow = pytest.importorskip("PIL.Image", reason="reading the picture back needs pillow")
    path = tmp_path / "found.png"
    check_plotting(path)
    plot(comparison(tokens, infinite), path)
    with pillow.open(path) as image:
        assert image.format == "PNG"
        assert image.width > 800
        # Ink of the curves and bars, not only an empty frame.
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 24)}
        assert (31, 78, 121) in colours
    plot(comparison(1, 1), path)  # nothing but bars


def test_nothing_infinite_is_in_the_document() -> None:
    quality = json.loads(json.dumps(comparison(infinite=1).to_json(), allow_nan=False))["quality"]
    assert (quality["mean_divergence"], quality["largest_divergence"]) == (None, None)
    assert quality["perplexity"] > 1


def test_a_missing_library_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InvalidRequest, match=r"pip install 'arriero\[plot\]', or leave --plot out"):
        check_plotting(tmp_path / "found.png")


def test_a_place_where_nothing_can_be_written_is_said_before_measuring(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"must end in \.png"):
        check_plotting(tmp_path / "found.pdf")
    with pytest.raises(InvalidRequest, match="there is no folder"):
        check_plotting(tmp_path / "absent" / "found.png")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(InvalidRequest, match="cannot be written"):
        plot(comparison(), tmp_path / "folder.png")
