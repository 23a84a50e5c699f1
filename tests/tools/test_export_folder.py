"""A GGUF file as a folder of plain numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from arriero.bench.compared import DEFAULT_TEXT, Side, compare_models
from arriero.formats.safetensors import SafetensorsFile
from arriero.source import FolderSource, GGUFSource
from tests.helpers.gguf_files import write_tiny_llama_gguf
from tools.export_folder import export

TEXT = DEFAULT_TEXT.read_text("utf-8")[:200]


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_the_folder_means_what_the_file_means(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "tiny.gguf"
    write_tiny_llama_gguf(file, kind)
    folder = export(file, tmp_path / "folder")
    sides = Side("file", GGUFSource((str(file),))), Side("folder", FolderSource(str(folder)))
    found = compare_models(*sides, TEXT, text_name="text", dtype="float32")
    assert {group.reference for group in found.weights.groups} == {kind}
    assert {group.candidate for group in found.weights.groups} == {"BF16"}
    assert (found.weights.only_reference, found.weights.only_candidate) == ([], [])
    # bfloat16 has eight bits of a number: at most one in 512 is lost, and 0.17 % of evenly spread numbers.
    assert 0.0005 < found.weights.error < 0.0025
    assert found.quality.mean_divergence < 1e-4
    assert found.quality.same_likeliest > 0.9


def test_vectors_keep_all_their_bits_and_special_tokens_are_named(tmp_path: Path) -> None:
    meaning = write_tiny_llama_gguf(tmp_path / "tiny.gguf")
    folder = export(tmp_path / "tiny.gguf", tmp_path / "folder")
    file = SafetensorsFile(folder / "model.safetensors")
    assert file.tensors.keys() == meaning.keys()
    name = "model.layers.0.input_layernorm.weight"
    assert file.view(name).tolist() == meaning[name].tolist()
    assert json.loads((folder / "tokenizer_config.json").read_text())["eos_token"]
