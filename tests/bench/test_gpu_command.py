"""`arriero bench gpu`, with and without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from arriero.bench import gpu, gpu_flash_next, gpu_mlx_lm
from arriero.bench.gpu import ModelRun, Report, Shares
from arriero.bench.gpu_conditions import Conditions, other_processes
from arriero.bench.gpu_drafts import Rounds
from arriero.bench.gpu_flash_next import Chunk, FlashNext
from arriero.bench.gpu_kernels import Measured
from arriero.bench.gpu_mlx_lm import MlxLm
from arriero.bench.gpu_models import Decoding
from arriero.bench.speed import Speed
from arriero.cli.gpu_tables import render as tables
from arriero.cli.main import cli
from arriero.errors import UnsupportedFeature
from arriero.kernels import device

ONE, EIGHT, PROMPT = Decoding(1, 512, 9000.0, 0.002), Decoding(8, 512, 9000.0, 0.004), Decoding(1, 4096, 20000.0, 0.002)
REPORT = Report(
    "A GPU",
    3e12,
    7e14,
    [
        Measured("product nvfp4", "8192 × 8192", 8, 2.5e-5, 1.6e-4, 0.5, 1.5e12, "GB/s"),
        Measured("product int8", "8192 × 8192", 512, 3e-5, None, 0.6, 1.8e14, "TFLOP/s"),
    ],
    {
        "Qwen3-8B": ModelRun(
            ONE,
            EIGHT,
            PROMPT,
            0.003,
            0.0025,
            Shares(0.6, 0.4, 0.5),
            6 << 30,
            MlxLm(0.005, 5000.0, 512),
            Rounds(7, 5, 0.004, 0.002, 1.0),
        ),
        "Gemma-4-31B": ModelRun(
            ONE, EIGHT, PROMPT, 0.003, 0.0025, Shares(0.6, 0.4, 0.5), 6 << 30, "mlx-lm is not installed"
        ),
    },
    {"Qwen3-8B": [Speed(500, 8, 9000.0, 210.0, 1500.0, 0.05, 0.01, 209.0)]},
    FlashNext(
        48,
        70 << 30,
        28 << 30,
        4e9,
        1440,
        0.01,
        65536,
        61440,
        10.0,
        2 << 30,
        0.02,
        Chunk(0.5, 1 << 30),
        Chunk(2.5, 9 << 30),
    ),
)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """What was asked for, instead of measuring it."""
    asked: list[tuple[tuple[str, ...], tuple[str, ...]]] = []

    def measure(names: tuple[str, ...], tell: object, *, through_server: tuple[str, ...] = ()) -> Report:
        asked.append((tuple(names), through_server))
        return REPORT

    monkeypatch.setattr(gpu, "measure", measure)
    return asked


def test_without_a_gpu_it_says_that_nothing_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "cuda", lambda: None)
    with pytest.raises(UnsupportedFeature, match="nothing was measured"):
        gpu.measure([])


def test_a_shape_that_is_not_known_is_refused_with_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "cuda", lambda: None)
    known = "Qwen3-8B, Qwen3-30B-A3B, Qwen3.5-35B-A3B, Qwen3.8-27B, Gemma-4-31B, Flash-Next, and kernels"
    with pytest.raises(UnsupportedFeature, match=f"no shape 'Llama-9' to measure; there are {known}"):
        gpu.measure(["Llama-9"])


@pytest.mark.usefixtures("measured")
def test_its_table_has_shares_and_what_plain_mlx_takes() -> None:
    shown = CliRunner().invoke(cli, ["bench", "gpu", "Qwen3-8B"], catch_exceptions=False).output
    assert "A GPU: copy 3000 GB/s, bfloat16 products 700 TFLOP/s" in shown
    assert "25.0 µs" in shown
    assert "× 6.4" in shown
    assert "180 TFLOP/s" in shown


def line_of(shown: str, start: str) -> list[str]:
    """The words of the first line that begins so, without that beginning."""
    return next(line for line in shown.splitlines() if line.startswith(start)).removeprefix(start).split()


@pytest.mark.usefixtures("measured")
def test_its_table_has_models_beside_mlx_lm_and_the_limit() -> None:
    shown = CliRunner().invoke(cli, ["bench", "gpu", "Qwen3-8B"], catch_exceptions=False).output
    assert line_of(shown, "decode, 1 row ") == ["2.00", "ms", "500", "60", "%", "×", "2.50"]
    assert line_of(shown, "decode, 8 rows") == ["4.00", "ms", "2000", "40", "%"]
    assert line_of(shown, "verify of 8 tokens") == ["3.00", "ms", "×", "1.20", "of", "one", "token", "50", "%"]
    assert line_of(shown, "prompt of 4096") == ["205", "ms", "20000", "×", "4.00", "(its", "512", "tokens)"]
    assert line_of(shown, "round of 7 drafts, 5 right") == ["4.00", "ms", "1500", "(plain", "500)"]
    assert "mlx-lm is not installed" in shown


@pytest.mark.usefixtures("measured")
def test_its_table_has_flash_next_with_and_without_the_kernels() -> None:
    shown = CliRunner().invoke(cli, ["bench", "gpu", "Flash-Next"], catch_exceptions=False).output
    assert line_of(shown, "prompt, 61440 of 65536 tokens")[:3] == ["10000", "ms", "6144"]
    assert line_of(shown, "its last chunk")[:2] == ["500", "ms"]
    assert line_of(shown, "the same by plain MLX")[:2] == ["2500", "ms"]


@pytest.mark.parametrize("name", ["Flash-Next", "kernels"])
def test_what_is_not_served_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedFeature, match=f"{name} is not measured through the server; Qwen3-8B"):
        gpu.measure([], through_server=[name])


def test_flash_next_gets_the_layers_and_the_table_that_fit() -> None:
    assert gpu.fitting(130 << 30, 120 << 30) == (48, 20_000_000)
    layers, ngrams = gpu.fitting(24 << 30, 16 << 30)
    assert layers % 4 == 0
    assert gpu_flash_next.weight_bytes(layers) < 0.8 * (24 << 30) < gpu_flash_next.weight_bytes(layers + 4)
    assert gpu_flash_next.table_bytes(ngrams) == pytest.approx(0.6 * (16 << 30), rel=1e-4)


@pytest.mark.usefixtures("measured")
def test_its_json_has_every_figure() -> None:
    shown = CliRunner().invoke(cli, ["bench", "gpu", "--json"], catch_exceptions=False).output
    found = json.loads(shown)
    assert found["kernels"][1]["plain_seconds"] is None
    assert found["models"]["Qwen3-8B"]["eight"]["step"] == 0.004
    assert found["models"]["Qwen3-8B"]["drafts"]["right"] == 5
    assert found["served"]["Qwen3-8B"][0]["streamed"] == 209.0


def test_it_draws_what_it_found(tmp_path: Path, measured: list[tuple[tuple[str, ...], tuple[str, ...]]]) -> None:
    path = tmp_path / "found.png"
    result = CliRunner().invoke(cli, ["bench", "gpu", "Qwen3-8B", "--plot", str(path)], catch_exceptions=False)
    assert result.exit_code == 0
    assert measured == [(("Qwen3-8B",), ())]
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 20_000


def test_a_place_that_takes_no_picture_is_told_before_anything_is_measured(
    tmp_path: Path, measured: list[tuple[tuple[str, ...], tuple[str, ...]]]
) -> None:
    result = CliRunner().invoke(cli, ["bench", "gpu", "--plot", str(tmp_path / "found.jpeg")])
    assert result.exit_code != 0
    assert ".png" in str(result.exception or result.output)
    assert measured == []


def test_served_models_are_asked_for_by_an_option(measured: list[tuple[tuple[str, ...], tuple[str, ...]]]) -> None:
    shown = CliRunner().invoke(cli, ["bench", "gpu", "kernels", "--served", "Qwen3-8B"], catch_exceptions=False).output
    assert measured == [(("kernels",), ("Qwen3-8B",))]
    assert line_of(shown, "8 ")[:4] == ["500", "210.0", "209.0", "1500.0"]


@pytest.mark.parametrize(
    "arguments", [["gpu", "--runs", "2"], ["gpu", "--quality"], ["some-model", "--served", "Qwen3-8B"]]
)
def test_options_of_other_measurements_are_refused(arguments: list[str]) -> None:
    result = CliRunner().invoke(cli, ["bench", *arguments])
    assert result.exit_code == 2


def test_of_several_shapes_one_that_fails_takes_no_other_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(name: str, copy: float, tell: object) -> ModelRun:
        if name == "Gemma-4-31B":
            raise RuntimeError("cudaMallocAsync failed: out of memory")
        return REPORT.models["Qwen3-8B"]

    monkeypatch.setattr(device, "cuda", object)
    monkeypatch.setattr(gpu, "copy_rate", lambda: 3e12)
    monkeypatch.setattr(gpu, "product_rate", lambda size: 7e14)
    monkeypatch.setattr(gpu, "model_run", run)
    monkeypatch.setattr(gpu, "conditions", lambda: Conditions(3e12, None))
    monkeypatch.setattr(gpu_mlx_lm, "beside", lambda *_, **__: "mlx-lm is elsewhere")
    with pytest.raises(RuntimeError, match="out of memory"):
        gpu.measure(["Gemma-4-31B"])
    shown = tables(gpu.measure(["Gemma-4-31B", "Qwen3-8B"]))
    assert "Gemma-4-31B was not measured: RuntimeError: cudaMallocAsync failed: out of memory" in shown
    assert line_of(shown, "decode, 1 row ")[0] == "2.00"


def test_a_part_that_was_not_alone_with_the_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([Conditions(3e12, 0), Conditions(2.6e12, 0), Conditions(2.9e12, 1)])
    monkeypatch.setattr(device, "cuda", object)
    monkeypatch.setattr(gpu, "copy_rate", lambda: 3e12)
    monkeypatch.setattr(gpu, "product_rate", lambda size: 7e14)
    monkeypatch.setattr(gpu, "conditions", lambda: next(found))
    monkeypatch.setattr(gpu, "every_kernel", lambda copy, tell: [])
    monkeypatch.setattr(gpu, "model_run", lambda *_: REPORT.models["Gemma-4-31B"])
    monkeypatch.setattr(gpu_mlx_lm, "beside", lambda *_, **__: "mlx-lm is elsewhere")
    report = gpu.measure(["kernels", "Gemma-4-31B"])
    assert report.disturbed == {
        "Gemma-4-31B": "copies ran at 2600 GB/s, 3000 at the start",
        "Gemma-4-31B, mlx-lm": "1 other process had the GPU open",
    }
    assert "Gemma-4-31B was not alone with the GPU: copies ran at 2600 GB/s" in tables(report)


def test_processes_that_the_drivers_tool_does_not_tell_are_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError("nvidia-smi")

    def says(what: str) -> None:
        said = subprocess.CompletedProcess(["nvidia-smi"], 0, what, "")
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: said)

    monkeypatch.setattr(subprocess, "run", missing)
    assert other_processes() is None
    says(f"{os.getpid()}\n17\n")
    assert other_processes() == 1
    says(f"{os.getpid()}\n")
    assert other_processes() == 0
    says("1\n17\n")  # numbers of another namespace
    assert other_processes() is None
    says("[Not Supported]\n")
    assert other_processes() is None
