"""Two models side by side: what is measured of them, and which pairs are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from arriero.bench.compared import DEFAULT_TEXT, Comparison, Side, compare_models, find
from arriero.bench.weights import weight_errors
from arriero.create.create import create
from arriero.create.request import CreateRequest
from arriero.errors import InvalidRequest, NotFound
from arriero.formats import affine
from arriero.model.checkpoint import Checkpoint
from arriero.source import FolderSource, GGUFSource, LayersSource
from arriero.store.store import Store
from tests.helpers.checkpoint_folder import tensors, upload, write_folder
from tests.helpers.gguf_files import write_tiny_llama_gguf
from tests.helpers.stored_model import SPECIAL, byte_tokenizer
from tests.helpers.unchecked import unchecked

TEXT = DEFAULT_TEXT.read_text("utf-8")[:300]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("plain") / "m")


@pytest.fixture(scope="module")
def store(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """`int4` and `whole`, made of the folder."""
    store = Store(tmp_path_factory.mktemp("store"))
    for name, how in (("int4", "int4"), ("whole", "")):
        request = CreateRequest(model=name, files=upload(store, folder), quantize=how)
        create(store, request, lambda status: None, check=unchecked)
    return store


@pytest.fixture(scope="module")
def found(folder: Path, store: Store) -> Comparison:
    sides = find(str(folder), store), find("int4", store)
    return compare_models(*sides, TEXT, text_name="some text", window=128, dtype="float32")


def test_folders_files_and_stored_models_are_found(folder: Path, store: Store, tmp_path: Path) -> None:
    write_tiny_llama_gguf(tmp_path / "tiny.gguf")
    assert isinstance(find("int4", store).source, LayersSource)
    assert find(str(folder), store).source == FolderSource(str(folder))
    assert find(str(tmp_path / "tiny.gguf"), store).source == GGUFSource((str(tmp_path / "tiny.gguf"),))
    for wrong in ("absent", str(tmp_path / "absent.gguf"), "a/b/c/d/e"):
        with pytest.raises(NotFound, match=r"is no folder, no GGUF file and no stored model"):
            find(wrong, store)


def test_a_quantised_model_differs_from_the_one_that_it_was_made_of(found: Comparison, folder: Path) -> None:
    assert found.quality.tokens == len(TEXT.encode()) - math.ceil(len(TEXT.encode()) / 128)
    assert found.quality.mean_divergence > 1e-7
    assert found.candidate_bytes < found.reference_bytes
    assert (found.dtype, found.window) == ("float32", 128)


def test_weight_errors_are_those_of_the_definition(found: Comparison, store: Store) -> None:
    group = next(g for g in found.weights.groups if g.name == "model.layers.*.self_attn.q_proj.weight")
    plain = tensors()["model.layers.0.self_attn.q_proj.weight"]
    view = Checkpoint.open(store.get("int4").source()).host_weight("model.layers.0.self_attn.q_proj.weight")
    assert view.scales is not None
    assert view.biases is not None
    missed = affine.dequantize(view.data, view.scales, view.biases, 64, 4) - plain
    assert (group.count, group.reference, group.candidate) == (1, "F32", "int4")
    assert group.error == pytest.approx(np.sqrt(np.square(missed).sum() / np.square(plain).sum()), rel=1e-5)
    assert group.largest == pytest.approx(np.abs(missed).max() / np.abs(plain).max(), rel=1e-5)
    assert 0.02 < group.error < 0.2


def test_what_keeps_its_precision_has_no_error_and_vectors_are_left_out(found: Comparison) -> None:
    errors = {g.name: g.error for g in found.weights.groups}
    assert errors["model.embed_tokens.weight"] == 0
    assert not [name for name in errors if "norm" in name]
    assert (found.weights.only_reference, found.weights.only_candidate) == ([], [])


def test_a_model_stored_as_it_is_equals_its_folder(folder: Path, store: Store) -> None:
    found = compare_models(find(str(folder), store), find("whole", store), TEXT, text_name="t", dtype="float32")
    assert found.quality.largest_divergence == 0
    assert found.quality.ratio == 1
    assert found.weights.error == 0


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp8", "int8"])
def test_every_layout_is_decoded_for_its_error(folder: Path, tmp_path: Path, kind: str) -> None:
    store = Store(tmp_path)
    request = CreateRequest(model="m", files=upload(store, folder), quantize=kind)
    told: list[str] = []
    create(store, request, lambda status: told.append(status["status"]), check=unchecked)
    errors = weight_errors(Checkpoint.open(FolderSource(str(folder))), Checkpoint.open(store.get("m").source()))
    stated = {
        line.partition(" to ")[2].partition(":")[0]: float(line.rpartition(" ")[2].rstrip("%")) / 100
        for line in told
        if "weight error" in line
    }
    for changed, error in stated.items():
        groups = [g for g in errors.groups if g.candidate == changed]
        # `create` states the root mean square over tensors of their errors.
        assert min(g.error for g in groups) - 1e-3 < error < max(g.error for g in groups) + 1e-3


def test_matrices_without_a_partner_are_named(folder: Path, tmp_path: Path) -> None:
    more = tensors() | {"lm_head.weight": np.zeros((259, 64), np.float32)}
    more["model.layers.0.mlp.up_proj.weight"] = np.zeros((32, 64), np.float32)
    other = write_folder(tmp_path / "m", {"model.safetensors": more})
    errors = weight_errors(*(Checkpoint.open(FolderSource(str(path))) for path in (folder, other)))
    assert errors.only_reference == ["model.layers.0.mlp.up_proj.weight"]
    assert errors.only_candidate == ["lm_head.weight", "model.layers.0.mlp.up_proj.weight"]


def vocabulary(folder: Path, special: tuple[str, ...]) -> Side:
    (folder / "tokenizer.json").write_text(byte_tokenizer(special).to_str())
    return Side("other", FolderSource(str(folder)))


def test_other_vocabularies_are_refused(folder: Path, tmp_path: Path) -> None:
    reference = Side("plain", FolderSource(str(folder)))
    other = write_folder(tmp_path / "m")
    with pytest.raises(InvalidRequest, match="plain and other have vocabularies of 259 and 258 tokens"):
        compare_models(reference, vocabulary(other, SPECIAL[1:]), TEXT, text_name="t")
    with pytest.raises(InvalidRequest, match=r"token 256 is '<\|endoftext\|>' in one and '<\|other\|>' in the other"):
        compare_models(reference, vocabulary(other, ("<|other|>", *SPECIAL[1:])), TEXT, text_name="t")


def test_a_vocabulary_that_cuts_the_text_otherwise_is_refused(folder: Path, tmp_path: Path) -> None:
    other = write_folder(tmp_path / "m")
    config = {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>", "add_bos_token": True}
    (other / "tokenizer_config.json").write_text(json.dumps(config))
    sides = Side("plain", FolderSource(str(folder))), Side("other", FolderSource(str(other)))
    with pytest.raises(InvalidRequest, match="cut the text differently, first at token 0"):
        compare_models(*sides, TEXT, text_name="t")


def test_a_text_of_one_token_predicts_nothing(folder: Path) -> None:
    side = Side("plain", FolderSource(str(folder)))
    with pytest.raises(InvalidRequest, match="t has 1 tokens, read in windows of 512: nothing is predicted"):
        compare_models(side, side, "a", text_name="t")


def test_the_document_is_json_and_has_every_figure(found: Comparison) -> None:
    document = json.loads(json.dumps(found.to_json()))
    assert document["quality"]["mean_divergence"] == found.quality.mean_divergence
    assert document["quality"]["ratio"] == found.quality.ratio
    assert {g["name"] for g in document["weights"]["groups"]} == {g.name for g in found.weights.groups}
    assert "predictions" not in document["quality"]
