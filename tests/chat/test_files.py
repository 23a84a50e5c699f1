"""The small files of a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from arriero.chat.files import TextFiles
from arriero.errors import CheckpointError
from arriero.source import FolderSource, GGUFSource, LayersSource


def test_a_missing_file_is_empty(tmp_path: Path) -> None:
    files = TextFiles.open(FolderSource(str(tmp_path)))
    assert files.json("config.json") == {}
    assert files.text("chat_template.jinja") is None
    assert "config.json" not in files


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff", b""])
def test_a_file_that_is_no_json_object_is_an_error_that_names_it(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        TextFiles.open(FolderSource(str(tmp_path))).json("config.json")


def test_text_that_is_not_utf8_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja"):
        TextFiles.open(FolderSource(str(tmp_path))).text("chat_template.jinja")


def test_a_blob_that_vanished_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    files = TextFiles.open(LayersSource(tensors={}, files={"config.json": str(tmp_path / "gone")}))
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        files.json("config.json")


def test_a_file_that_is_no_gguf_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"not a model")
    with pytest.raises(CheckpointError):
        TextFiles.open(GGUFSource((str(path),)))
