"""DRAFT: a draft is stored beside its model, in its own precision, and only beside one that it was made for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from arriero.create.create import create
from arriero.create.gather import gather
from arriero.create.request import CreateRequest
from arriero.errors import ArrieroError, CheckpointError, InvalidRequest, UnsupportedArchitecture, UnsupportedFeature
from arriero.model.architectures import load_model
from arriero.model.checkpoint import Checkpoint
from arriero.model.drafts import load_draft
from arriero.modelfile import parse
from arriero.source import FolderSource
from arriero.store.describe import details_of, draft_of, model_info, modelfile_of
from arriero.store.model import StoredModel
from arriero.store.store import Store
from tests.create.conftest import Judged
from tests.helpers.checkpoint_folder import upload
from tests.helpers.drafts import GOLDENS, TARGETS
from tests.helpers.gguf_files import write_tiny_llama_gguf
from tests.helpers.golden_store import small_tokenizer

PAIRS = {"dflash_full": "qwen3", "dflash2": "qwen3_5_moe", "assistant_e2b": "gemma4_e2b", "dflash_laguna": "laguna"}


def target_folder(tmp_path: Path, name: str) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    for file in ("config.json", "model.safetensors"):
        shutil.copy(TARGETS / name / file, folder / file)
    (folder / "tokenizer.json").write_text(small_tokenizer())
    return folder


def draft_folder(tmp_path: Path, name: str, **changes: Any) -> Path:
    folder = tmp_path / "draft"
    folder.mkdir()
    config = json.loads((GOLDENS / name / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(GOLDENS / name / "model.safetensors", folder / "model.safetensors")
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def made(store: Store, judged: Judged, **fields: Any) -> StoredModel:
    return create(store, CreateRequest(**({"model": "m"} | fields)), lambda status: None, check=judged)


def both(store: Store, tmp_path: Path, judged: Judged, name: str, **fields: Any) -> StoredModel:
    files = upload(store, target_folder(tmp_path, PAIRS[name]))
    return made(store, judged, files=files, draft_files=upload(store, draft_folder(tmp_path, name)), **fields)


@pytest.mark.parametrize("name", PAIRS)
def test_a_draft_is_stored_beside_its_model_and_loads_from_there(store, tmp_path, judged, name):
    model = both(store, tmp_path, judged, name)
    source = model.source()
    target = load_model(Checkpoint.open(source), mx.float32)
    beside = Checkpoint.open_draft(source)
    assert beside is not None
    draft = load_draft(beside, target, mx.float32)
    folder = Checkpoint.open(FolderSource(str(GOLDENS / name)))
    assert draft.facts.architecture == folder.config["architectures"][0]
    assert sorted(beside.names()) == sorted(folder.names())
    for tensor in folder.names():
        np.testing.assert_array_equal(
            np.array(beside.tensor(tensor).astype(mx.float32)), np.array(folder.tensor(tensor).astype(mx.float32))
        )


def test_the_uploaded_files_of_a_draft_are_gone_afterwards(store, tmp_path, judged):
    model = both(store, tmp_path, judged, "dflash_full")
    uploaded = upload(store, tmp_path / "draft")["model.safetensors"]
    assert uploaded not in model.manifest.digests()
    made(
        store,
        judged,
        model="again",
        from_="m",
        draft_files={"model.safetensors": uploaded, "config.json": upload(store, tmp_path / "draft")["config.json"]},
    )
    assert not store.blobs.has(uploaded)


def test_the_configuration_blob_says_where_the_draft_is(store, tmp_path, judged):
    model = both(store, tmp_path, judged, "dflash_full")
    assert model.config.draft == {
        "model_format": "safetensors",
        "architecture": "DFlashDraftModel",
        "tensor_prefix": "draft.",
        "config": "draft/config.json",
        "file_type": "BF16",
        "model_type": "52K",
    }
    assert "draft/config.json" in model.files
    assert "draft/tokenizer.json" not in model.files


def test_target_and_draft_each_get_their_own_precision(store, tmp_path, judged):
    model = both(store, tmp_path, judged, "dflash_full", quantize="int8", draft_quantize="mxfp4")
    alone = made(store, judged, model="alone", files=upload(store, tmp_path / "target"), quantize="int8")
    assert model.draft is not None
    assert (model.details.quantization_level, model.draft.quantization_level) == ("int8", "mxfp4")
    assert model.details.parameter_size == alone.details.parameter_size
    assert model_info(model)["general.parameter_count"] == model_info(alone)["general.parameter_count"]
    assert details_of(model) == details_of(alone)
    # Their configuration blobs differ, for one says where the draft is.
    assert model.size - model.manifest.config.size == alone.size - alone.manifest.config.size
    beside = Checkpoint.open_draft(model.source())
    assert beside is not None
    how = {name: beside.info(name).quantization for name in beside.names()}
    assert {q.name for q in how.values() if q is not None} == {"mxfp4"}
    assert how["norm.weight"] is None
    load_draft(beside, load_model(Checkpoint.open(model.source()), mx.float32), mx.float32)


@pytest.mark.parametrize("kind", ["nvfp4", "int4", "int8", "mxfp8", "f16"])
@pytest.mark.parametrize("name", ["dflash2", "assistant_e2b"])
def test_every_precision_of_a_draft_loads(store, tmp_path, judged, name, kind):
    model = both(store, tmp_path, judged, name, draft_quantize=kind)
    beside = Checkpoint.open_draft(model.source())
    assert beside is not None
    load_draft(beside, load_model(Checkpoint.open(model.source()), mx.float32), mx.float32)
    assert model.draft is not None
    assert model.draft.quantization_level.lower() == kind


def test_a_draft_is_put_beside_a_stored_model_and_replaces_its_old_one(store, tmp_path, judged):
    base = made(store, judged, model="base", files=upload(store, target_folder(tmp_path, "qwen3")))
    files = upload(store, draft_folder(tmp_path, "dflash_full"))
    first = made(store, judged, from_="base", draft_files=files)
    second = made(store, judged, from_="m", draft="m", draft_quantize="int8")
    assert base.draft is None
    assert first.draft is not None
    assert second.draft is not None
    assert (first.draft.quantization_level, second.draft.quantization_level) == ("BF16", "int8")
    names = [layer.name for layer in second.manifest.layers if layer.name]
    assert len(names) == len(set(names))
    kept = {layer.digest for layer in base.manifest.layers}
    assert kept <= {layer.digest for layer in second.manifest.layers}
    assert store.verify() == []


def test_a_model_made_of_one_with_a_draft_keeps_it(store, tmp_path, judged):
    first = both(store, tmp_path, judged, "dflash_full")
    second = made(store, judged, model="n", from_="m", system="s")
    assert second.config.draft == first.config.draft
    assert Checkpoint.open_draft(second.source()) is not None


def test_the_draft_of_another_model_is_named(store, tmp_path, judged):
    both(store, tmp_path, judged, "dflash_full")
    made(store, judged, model="bare", files=upload(store, tmp_path / "target"))
    model = made(store, judged, model="n", from_="bare", draft="m")
    assert model.draft == store.get("m").draft
    with pytest.raises(UnsupportedArchitecture, match=r"draft model Qwen3ForCausalLM is not supported"):
        made(store, judged, model="n", from_="bare", draft="bare")


def test_a_gguf_model_takes_a_draft_too(store, tmp_path, judged):
    write_tiny_llama_gguf(tmp_path / "tiny.gguf", "Q8_0", layers=3)
    folder = tmp_path / "g"
    folder.mkdir()
    (tmp_path / "tiny.gguf").rename(folder / "tiny.gguf")
    draft = upload(store, draft_folder(tmp_path, "dflash_full", vocab_size=268))
    model = made(store, judged, files=upload(store, folder), draft_files=draft)
    assert (model.format, model.details.quantization_level) == ("gguf", "F32")
    source = model.source()
    target = load_model(Checkpoint.open(source), mx.float32)
    beside = Checkpoint.open_draft(source)
    assert beside is not None
    assert load_draft(beside, target, mx.float32).facts.architecture == "DFlashDraftModel"
    assert made(store, judged, model="n", from_="m", system="s").draft == model.draft
    assert parse(modelfile_of(model)).last("draft") == "m:latest"


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"hidden_size": 32}, r"hidden.* is 32 in the draft's configuration and 64 in the model"),
        ({"vocab_size": 500}, r"is 500 in the draft's configuration and 128 in the model"),
        ({"num_target_layers": 40}, r"is 40 in the draft's configuration and 3 in the model"),
    ],
)
def test_a_draft_of_another_model_is_refused_with_both_numbers(store, tmp_path, judged, changes, match):
    files = upload(store, target_folder(tmp_path, "qwen3"))
    draft = upload(store, draft_folder(tmp_path, "dflash_full", **changes))
    with pytest.raises(CheckpointError, match=match):
        made(store, judged, files=files, draft_files=draft)
    assert store.list() == []


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({"draft_quantize": "int8"}, InvalidRequest, "--draft-quantize requires a DRAFT model"),
        ({"draft_quantize": "q5"}, InvalidRequest, "is not known"),
        ({"draft": "nobody"}, ArrieroError, "not found"),
        ({"draft": "a", "draft_files": {"config.json": "sha256:" + "0" * 64}}, InvalidRequest, "one draft"),
        ({"draft_files": {"/x/config.json": "sha256:" + "0" * 64}}, InvalidRequest, "relative"),
    ],
)
def test_what_a_request_says_of_drafts_is_checked(store, tmp_path, judged, fields, error, match):
    with pytest.raises(error, match=match):
        made(store, judged, files=upload(store, target_folder(tmp_path, "qwen3")), **fields)


def test_a_draft_of_an_unknown_kind_is_refused_with_the_known_ones(store, tmp_path, judged):
    draft = upload(store, draft_folder(tmp_path, "dflash_full", architectures=["EagleModel"]))
    with pytest.raises(UnsupportedArchitecture, match=r"EagleModel is not supported; known drafts: DFlash2DraftModel"):
        made(store, judged, files=upload(store, target_folder(tmp_path, "qwen3")), draft_files=draft)


def test_a_draft_alone_is_no_model(store, tmp_path, judged):
    folder = draft_folder(tmp_path, "dflash_full")
    with pytest.raises(UnsupportedFeature, match=r"DFlashDraftModel is a draft.*: FROM that model, DRAFT this one"):
        made(store, judged, files=upload(store, folder))
    with pytest.raises(UnsupportedFeature, match=r"is a draft"):
        gather(parse("FROM ./draft\n"), tmp_path)


def test_a_gguf_file_is_no_draft(store, tmp_path, judged):
    write_tiny_llama_gguf(tmp_path / "tiny.gguf")
    digest = store.blobs.ingest([(tmp_path / "tiny.gguf").read_bytes()]).digest
    files = upload(store, target_folder(tmp_path, "qwen3"))
    with pytest.raises(UnsupportedFeature, match=r"the draft tiny.gguf is a GGUF file"):
        made(store, judged, files=files, draft_files={"tiny.gguf": digest})
    with pytest.raises(UnsupportedFeature, match=r"DRAFT ./tiny.gguf is a GGUF file"):
        gather(parse("FROM ./target\nDRAFT ./tiny.gguf\n"), tmp_path)


def test_draft_names_a_folder_or_a_model(tmp_path):
    target_folder(tmp_path, "qwen3")
    draft_folder(tmp_path, "dflash_full")
    found = gather(parse("FROM ./target\nDRAFT ./draft\n"), tmp_path)
    assert set(found.body["draft_files"]) == {"config.json", "model.safetensors", "tokenizer.json"}
    assert set(found.body["draft_files"].values()) <= set(found.uploads)
    assert gather(parse("FROM base\nDRAFT other:8b\n"), tmp_path).body == {"from": "base", "draft": "other:8b"}


def test_a_modelfile_shows_the_draft_and_makes_the_model_again(store, tmp_path, judged):
    model = both(store, tmp_path, judged, "dflash_full")
    shown = parse(modelfile_of(model))
    # A safetensors model is FROM its own name, which brings the draft.
    assert shown.all("from") == ["m:latest"]
    assert shown.all("draft") == []
    again = made(store, judged, model="again", modelfile=modelfile_of(model))
    assert again.draft == model.draft


def test_show_tells_of_a_draft_whose_configuration_says_little(store, tmp_path, judged):
    model = both(store, tmp_path, judged, "dflash_full", draft_quantize="int4")
    stripped = {k: v for k, v in (model.config.draft or {}).items() if k not in ("file_type", "model_type")}
    vars(model)["draft"] = None
    del vars(model)["draft"]
    object.__setattr__(model, "config", type(model.config)(model_format="safetensors", draft=stripped))
    found = draft_of(model)
    assert found is not None
    assert (found.architecture, found.quantization_level, found.parameter_size) == ("DFlashDraftModel", "int4", "52K")
