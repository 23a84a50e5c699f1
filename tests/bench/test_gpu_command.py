"""`arriero bench gpu`, with and without a GPU."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from arriero.bench import gpu
from arriero.bench.gpu import Measured, Report
from arriero.bench.gpu_models import Decoding
from arriero.cli.main import cli
from arriero.errors import UnsupportedFeature
from arriero.kernels import device
from tests.helpers.cuda import EMULATED

REPORT = Report(
    3e12,
    7e14,
    [
        Measured("product nvfp4", "8192 × 8192", 8, 2.5e-5, 1.6e-4, 0.5, 1.5e12, "GB/s"),
        Measured("product int8", "8192 × 8192", 1, 3e-5, None, 0.6, 1.8e12, "GB/s"),
    ],
    {"Qwen3-8B": [Decoding(8, 512, 9000.0, 0.004)]},
)


def test_without_a_gpu_it_says_that_nothing_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "cuda", lambda: None)
    with pytest.raises(UnsupportedFeature, match="nothing was measured"):
        gpu.measure([])


def test_a_shape_that_is_not_known_is_refused_with_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "cuda", lambda: EMULATED)
    with pytest.raises(UnsupportedFeature, match="'Llama-9' is not known; there are Qwen3-8B"):
        gpu.measure(["Llama-9"])


def test_its_table_has_shares_and_what_plain_mlx_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "measure", lambda shapes, tell: REPORT)
    shown = CliRunner().invoke(cli, ["bench", "gpu", "Qwen3-8B"], catch_exceptions=False).output
    assert "copy 3000 GB/s, bfloat16 products 700 TFLOP/s" in shown
    assert "25.0 µs" in shown
    assert "× 6.4" in shown
    assert "4.00 ms" in shown
    assert "2000" in shown


def test_its_json_has_every_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "measure", lambda shapes, tell: REPORT)
    shown = CliRunner().invoke(cli, ["bench", "gpu", "--json"], catch_exceptions=False).output
    found = json.loads(shown)
    assert found["kernels"][1]["plain_seconds"] is None
    assert found["models"]["Qwen3-8B"][0]["step"] == 0.004


def test_options_of_other_measurements_are_refused() -> None:
    result = CliRunner().invoke(cli, ["bench", "gpu", "--runs", "2"])
    assert result.exit_code != 0
