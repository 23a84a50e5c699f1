"""The check before an import: models are built of zeros in every layout, and drafts with them."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from arriero.create import accept
from arriero.create.create import create
from arriero.create.request import CreateRequest
from arriero.errors import CheckpointError, LoadError
from arriero.formats.safetensors import SafetensorsFile, write
from arriero.store.store import Store
from tests.create.conftest import Judged
from tests.helpers.checkpoint_folder import upload, write_folder
from tests.helpers.drafts import GOLDENS as HEADS
from tests.helpers.drafts import TARGETS
from tests.helpers.golden_store import small_tokenizer
from tests.helpers.layouts import LAYOUTS


def make(tmp_path: Path, folder: Path, judged: Judged, kind: str = "") -> accept.Verdict:
    (folder / "tokenizer.json").write_text(small_tokenizer())
    store = Store(tmp_path / "store")
    request = CreateRequest(model="m", files=upload(store, folder), quantize=kind)
    create(store, request, lambda status: None, check=judged)
    return judged.verdicts[-1]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", LAYOUTS)
def test_published_layouts_are_accepted(tmp_path, judged, name):
    verdict = make(tmp_path, LAYOUTS[name]().write(tmp_path / "m"), judged)
    assert [left for left in verdict.unused if not left.startswith("mtp.")] == []


@pytest.mark.parametrize("kind", ["nvfp4", "int8"])
@pytest.mark.parametrize("head", ["mtp_qwen3_5", "mtp_qwen3_5_moe", "mtp_qwen3_next", "mtp_qwen4_exp"])
def test_a_model_with_a_head_is_accepted_with_it_at_another_precision(tmp_path, judged, head, kind):
    target = TARGETS / json.loads((HEADS / head / "config.json").read_text())["target"]
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text((target / "config.json").read_text())
    parts = [SafetensorsFile(place / "model.safetensors") for place in (target, HEADS / head)]
    write(folder / "model.safetensors", {name: file.view(name) for file in parts for name in file.tensors})
    verdict = make(tmp_path, folder, judged, kind)
    assert verdict.unused == []


def test_a_head_that_lacks_a_tensor_is_refused(tmp_path, judged):
    target = TARGETS / json.loads((HEADS / "mtp_qwen3_5" / "config.json").read_text())["target"]
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text((target / "config.json").read_text())
    parts = [SafetensorsFile(place / "model.safetensors") for place in (target, HEADS / "mtp_qwen3_5")]
    held = {name: file.view(name) for file in parts for name in file.tensors}
    write(
        folder / "model.safetensors", {name: value for name, value in held.items() if "mtp.layers.0.mlp.up" not in name}
    )
    with pytest.raises(CheckpointError, match=r"not created: tensor mtp.layers.0.mlp.up_proj.weight is missing"):
        make(tmp_path, folder, judged)


def test_the_sentence_names_no_temporary_file(tmp_path, judged):
    held = {"model.embed_tokens.weight": np.zeros((259, 64), ml_dtypes.bfloat16)}
    with pytest.raises(CheckpointError) as refused:
        make(tmp_path, write_folder(tmp_path / "m", {"model.safetensors": held}), judged)
    assert "arriero-check" not in str(refused.value)
    assert str(tmp_path) not in str(refused.value)


def test_a_process_that_fails_is_an_error_with_its_last_words(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "m")
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho out of luck >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr("arriero.create.check.sys.executable", str(program))
    store = Store(tmp_path / "store")
    with pytest.raises(LoadError, match="ended with status 3: out of luck"):
        create(store, CreateRequest(model="m", files=upload(store, folder)), lambda status: None)
    assert store.list() == []
