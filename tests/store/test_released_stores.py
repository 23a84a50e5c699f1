"""Stores that released versions wrote are read, and their models answer what they answered then (M07)."""

from __future__ import annotations

import tarfile
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from arriero.model.architectures import load_model
from arriero.model.checkpoint import Checkpoint
from arriero.model.drafts import load_draft
from arriero.store.describe import details_of, draft_of, model_info, modelfile_of
from arriero.store.store import Store
from tests.helpers.forward import whole
from tools.make_stored_fixture import MODELS, RELEASED

VERSIONS = sorted(path.name for path in RELEASED.glob("*.tar.xz"))


@pytest.fixture(scope="module", params=VERSIONS)
def released(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("released")
    with tarfile.open(RELEASED / request.param) as archive:
        archive.extractall(folder, filter="data")
    return folder


def test_the_first_version_is_kept():
    assert "0.1.0.tar.xz" in VERSIONS


def test_everything_is_listed_shown_and_sound(released):
    store = Store(released)
    assert {str(model.name).partition(":")[0] for model in store.list()} >= set(MODELS)
    assert store.verify() == []
    for model in store.list():
        assert details_of(model).parameter_size
        assert model_info(model)["general.parameter_count"] > 0
        assert "SYSTEM Be brief." in modelfile_of(model)
    draft = draft_of(store.get("qwen3-drafted"))
    assert draft is not None
    assert (draft.architecture, draft.quantization_level) == ("DFlashDraftModel", "BF16")


def test_every_model_answers_what_it_answered_then(released):
    with np.load(released / "answers.npz") as answers:
        for model in Store(released).list():
            name = str(model.name).partition(":")[0]
            found = whole(load_model(Checkpoint.open(model.source()), mx.float32), answers[f"{name}.ids"].tolist())
            np.testing.assert_allclose(found, answers[f"{name}.logits"], rtol=0, atol=2e-4, err_msg=name)


def test_a_draft_loads_with_its_model(released):
    source = Store(released).get("qwen3-drafted").source()
    beside = Checkpoint.open_draft(source)
    assert beside is not None
    target = load_model(Checkpoint.open(source), mx.float32)
    assert load_draft(beside, target, mx.float32).facts.architecture == "DFlashDraftModel"
