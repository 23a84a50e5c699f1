"""`arriero bench --quality` from the outside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from arriero.cli.main import cli
from tests.helpers.checkpoint_folder import tensors, write_folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    place = tmp_path_factory.mktemp("folders")
    other = {"model.safetensors": {name: 1.01 * value for name, value in tensors().items()}}
    return str(write_folder(place / "a", other)), str(write_folder(place / "b"))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    for name in ("ARRIERO_MODELS", "OLLAMA_MODELS"):
        monkeypatch.setenv(name, str(tmp_path / name))
    return lambda *arguments: CliRunner().invoke(cli, ["bench", *arguments])


def test_a_table_of_sizes_perplexities_divergences_and_weights(run, folders, tmp_path: Path) -> None:
    picture = tmp_path / "found.png"
    result: Result = run("--quality", *folders, "--most", "60", "--plot", str(picture))
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"{folders[0]} against {folders[1]}: 59 tokens of the default text in windows of 512")
    table = {line.split()[0]: line.split() for line in lines if line}
    assert table["perplexity"][-1] == "%"
    assert table["model.layers.*.mlp.up_proj.weight"][1:4] == ["1", "F32", "F32"]
    assert float(table["model.layers.*.mlp.up_proj.weight"][8]) == pytest.approx(1, abs=0.01)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_json_has_the_same_figures(run, folders, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Ein Satz, der gelesen wird.")
    result: Result = run("--quality", *folders, "--text", str(text), "--window", "16", "--dtype", "float32", "--json")
    document = json.loads(result.stdout)
    assert (document["text"], document["window"], document["dtype"]) == (str(text), 16, "float32")
    assert document["quality"]["tokens"] == 27 - 2
    assert document["weights"]["error"] == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--quality", "a"], "--quality compares MODEL with REFERENCE, two models; 1 given"),
        (["a", "b"], "speed is measured of one model, 2 were given (two need --quality)"),
        (["--quality", "a", "b", "--runs", "2"], "--runs goes without --quality"),
        (["a", "--plot", "x.png"], "--plot belongs to --quality"),
        (["a", "--window", "64"], "--window belongs to --quality"),
    ],
)
def test_options_without_effect_are_refused(run, arguments: list[str], said: str) -> None:
    result: Result = run(*arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.output.replace("│", " ").split())


def test_a_text_that_is_not_utf_8_is_refused(run, folders, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"\xff\xfe")
    result: Result = run("--quality", *folders, "--text", str(text))
    assert result.exit_code == 1
    assert "is not UTF-8" in result.output
