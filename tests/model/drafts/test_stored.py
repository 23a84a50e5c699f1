"""Where drafts come from: folders of their own, and stored models that have one beside them."""

from __future__ import annotations

import logging
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from arriero.errors import CheckpointError
from arriero.model.architectures import load_model
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Model
from arriero.model.drafts import load_draft
from arriero.model.drafts.dflash import BlockDraft
from arriero.model.weight import Quantization
from arriero.source import FolderSource, GGUFSource, LayersSource
from tests.helpers.drafts import GOLDENS, TARGETS, draft_checkpoint, golden_of, one_row, target_checkpoint, target_of
from tests.helpers.memory_checkpoint import MemoryCheckpoint, quantize

NAME = "dflash2"


def stored(folder: Path, checkpoint: MemoryCheckpoint, prefix: str = "") -> dict[str, str]:
    """One file a tensor, by layer name."""
    layers = {}
    for number, (key, value) in enumerate(checkpoint.tensors.items()):
        name = prefix + key
        layers[name] = str(folder / f"{prefix}{number}.safetensors")
        if isinstance(value, mx.array):
            mx.save_safetensors(layers[name], {name: value})
            continue
        assert value.scales is not None
        parts = {name: value.data, f"{name}.scale": value.scales}
        if value.biases is not None:
            parts[f"{name}.bias"] = value.biases
        mx.save_safetensors(layers[name], parts, {"quant_type": "int4", "group_size": "32"})
    return layers


def source(folder: Path, draft: MemoryCheckpoint) -> LayersSource:
    """A stored model with the golden draft beside its target."""
    target = TARGETS / draft_checkpoint(NAME).config["target"] / "config.json"
    files = {"config.json": str(target), "draft/config.json": str(GOLDENS / NAME / "config.json")}
    return LayersSource(stored(folder, target_checkpoint(NAME)) | stored(folder, draft, "draft."), files)


def states(checkpoint: Checkpoint | MemoryCheckpoint, target: Model) -> np.ndarray:
    opened = checkpoint.typed() if isinstance(checkpoint, MemoryCheckpoint) else checkpoint
    draft = load_draft(opened, target, mx.float32)
    assert isinstance(draft, BlockDraft)
    caches = draft.new_caches()
    draft.commit(one_row([0] * 14, 0, caches), mx.array(golden_of(NAME)["taps"][:14]))
    return np.array(draft.forward(one_row([5, 127, 127], 14, caches)))


@pytest.mark.parametrize("name", ["dflash2", "dflash_laguna", "assistant_e2b"])
def test_a_draft_loads_from_its_own_folder(name: str) -> None:
    checkpoint = Checkpoint.open(FolderSource(str(GOLDENS / name)))
    assert (
        load_draft(checkpoint, target_of(name), mx.float32).facts.architecture == checkpoint.config["architectures"][0]
    )
    assert checkpoint.unused() == []


def test_a_draft_stored_beside_its_model_gives_the_same_bits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    both = source(tmp_path, draft_checkpoint(NAME))
    with caplog.at_level(logging.WARNING):
        target = load_model(Checkpoint.open(both), mx.float32)
    assert not caplog.records
    checkpoint = Checkpoint.open_draft(both)
    assert checkpoint is not None
    assert "draft" in checkpoint.label
    assert set(checkpoint.names()) == set(draft_checkpoint(NAME).tensors)
    np.testing.assert_array_equal(states(checkpoint, target), states(draft_checkpoint(NAME), target_of(NAME)))


def test_a_packed_stored_draft_is_decoded_as_it_says(tmp_path: Path) -> None:
    how = Quantization("affine", 4, 32)
    packed = draft_checkpoint(NAME).quantized(how, scales=mx.bfloat16)
    checkpoint = Checkpoint.open_draft(source(tmp_path, packed))
    assert checkpoint is not None
    assert checkpoint.info("layers.0.self_attn.q_proj.weight").quantization == how
    np.testing.assert_array_equal(states(checkpoint, target_of(NAME)), states(packed, target_of(NAME)))


def test_a_codebook_may_be_packed(tmp_path: Path) -> None:
    wide = draft_checkpoint(NAME)
    config = {**wide.config, "dflash_config": {**wide.config["dflash_config"], "selector_rank": 32}}
    key = mx.random.key(2)
    for book, rows in (("predecessor_codebook", 128), ("successor_codebook", 128), ("hidden_projection.weight", 32)):
        columns = 64 if rows == 32 else 32
        wide.tensors[f"candidate_selector.{book}"] = mx.random.normal((rows, columns), key=key)
    packed = dict(wide.tensors)
    for book in ("predecessor_codebook", "successor_codebook"):
        name = f"candidate_selector.{book}"
        packed[name] = quantize(packed[name], Quantization("affine", 4, 32))
    checkpoint = MemoryCheckpoint(config, packed)
    found = []
    for one in (checkpoint, checkpoint.dequantized()):
        draft = load_draft(one.typed(), target_of(NAME), mx.float32)
        scores: list[np.ndarray] = []

        def pick(values: mx.array, ids: mx.array | None = None, scores: list[np.ndarray] = scores) -> mx.array:
            scores.append(np.array(values))
            assert ids is not None
            return ids[:, 0]

        batch = one_row([0] * 14, 0, draft.new_caches())
        mx.eval(draft.propose(batch, mx.array(golden_of(NAME)["taps"][:14]), mx.array([3]), 3, pick))
        found.append(np.concatenate(scores))
    np.testing.assert_allclose(found[0], found[1], rtol=0, atol=1e-3)


def test_a_stored_draft_without_its_configuration_is_refused(tmp_path: Path) -> None:
    both = source(tmp_path, draft_checkpoint(NAME))
    del both.files["draft/config.json"]
    with pytest.raises(CheckpointError, match=r"no draft/config\.json layer"):
        Checkpoint.open_draft(both)


def test_models_without_a_draft_have_none(tmp_path: Path) -> None:
    both = source(tmp_path, draft_checkpoint(NAME))
    alone = {name: path for name, path in both.tensors.items() if not name.startswith("draft.")}
    assert Checkpoint.open_draft(LayersSource(alone, both.files)) is None
    assert Checkpoint.open_draft(FolderSource(str(GOLDENS / NAME))) is None
    assert Checkpoint.open_draft(GGUFSource(("model.gguf",))) is None
