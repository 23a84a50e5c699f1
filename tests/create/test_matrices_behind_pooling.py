"""The matrices that EmbeddingGemma has behind its pooling come with it, or it does not come at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from arriero.create.gather import gather
from arriero.create.inventory import take_inventory
from arriero.errors import InvalidRequest
from arriero.formats.safetensors_folder import open_folder
from arriero.modelfile import parse
from tests.helpers.embedding_server import gemma_folder

MATRICES = ["2_Dense/model.safetensors", "3_Dense/model.safetensors"]


def files_of(folder: Path) -> dict[str, Path]:
    return {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}


def test_they_are_gathered_and_get_names_of_their_own(tmp_path: Path) -> None:
    folder = gemma_folder(tmp_path / "m")
    assert set(MATRICES) <= set(gather(parse(f"FROM {folder}"), tmp_path).body["files"])
    for tensors in (take_inventory(files_of(folder)).tensors, open_folder(folder)):
        shapes = [tensors[f"dense.{index}.weight"].tensors[f"dense.{index}.weight"].shape for index in range(2)]
        assert shapes == [(64, 32), (32, 64)]


def test_without_one_of_them_nothing_is_created(tmp_path: Path) -> None:
    files = files_of(gemma_folder(tmp_path / "m"))
    del files[MATRICES[1]]
    with pytest.raises(InvalidRequest, match=r"3_Dense.model.safetensors is missing"):
        take_inventory(files)
