"""Encoders of texts: their states are transformers', whatever shares the forward."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from arriero.errors import CheckpointError
from arriero.model.architectures import ENCODERS, check_config, load_model
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Encoder
from arriero.source import FolderSource
from tests.helpers.forward import whole

ENCODER_GOLDENS = Path(__file__).parent / "encoders"
NAMES = sorted(path.name for path in ENCODER_GOLDENS.iterdir())


def load(folder: Path, dtype: mx.Dtype = mx.float32) -> Encoder:
    model = load_model(Checkpoint.open(FolderSource(str(folder))), dtype)
    assert isinstance(model, Encoder)
    return model


def expected(name: str) -> list[tuple[np.ndarray, np.ndarray]]:
    held = np.load(ENCODER_GOLDENS / name / "expected.npz")
    return [(held[f"ids{i}"], held[f"states{i}"]) for i in range(3)]


def states(model: Encoder, *texts: np.ndarray) -> np.ndarray:
    return np.array(model.encode(mx.array(np.concatenate(texts)), [len(text) for text in texts]).astype(mx.float32))


@pytest.mark.parametrize("name", NAMES)
def test_states_equal_those_of_transformers(name: str) -> None:
    model = load(ENCODER_GOLDENS / name)
    for ids, wanted in expected(name):
        np.testing.assert_allclose(states(model, ids), wanted, atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_texts_in_one_forward_do_not_see_each_other(name: str) -> None:
    model = load(ENCODER_GOLDENS / name)
    cases = expected(name)
    together = states(model, *(ids for ids, _ in cases))
    np.testing.assert_allclose(together, np.concatenate([wanted for _, wanted in cases]), atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_sixteen_bits_stay_sixteen_bits(name: str) -> None:
    model = load(ENCODER_GOLDENS / name, mx.bfloat16)
    ids, wanted = expected(name)[0]
    found = model.encode(mx.array(ids), [len(ids)])
    assert found.dtype == mx.bfloat16
    assert np.abs(np.array(found.astype(mx.float32)) - wanted).max() < 0.25


@pytest.mark.parametrize("name", NAMES)
def test_every_weight_is_owned_and_nothing_of_the_network_is_left(name: str) -> None:
    checkpoint = Checkpoint.open(FolderSource(str(ENCODER_GOLDENS / name)))
    model = load_model(checkpoint, mx.float32)
    unused = [tensor for tensor in checkpoint.unused() if "pooler" not in tensor and "position_ids" not in tensor]
    assert unused == []
    held = {id(array): array for array in model.parameters()}
    assert sum(array.size for array in held.values()) > 10_000


def test_positions_of_roberta_begin_behind_the_padding() -> None:
    model = load(ENCODER_GOLDENS / "xlm_roberta")
    assert model.facts.context_length == 40


def test_a_head_beside_the_encoder_is_left_alone(tmp_path: Path) -> None:
    plain = mx.load(str(ENCODER_GOLDENS / "bert" / "model.safetensors"))
    assert isinstance(plain, dict)
    renamed = {f"bert.{name}": value for name, value in plain.items()} | {"cls.predictions.bias": mx.zeros(60)}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), renamed)
    config = json.loads((ENCODER_GOLDENS / "bert" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    ids, wanted = expected("bert")[0]
    np.testing.assert_allclose(states(load(tmp_path), ids), wanted, atol=2e-5)


NOMIC_NAMES = {
    "embeddings.LayerNorm": "emb_ln",
    "self_attn.o_proj": "attn.out_proj",
    "mlp.up_proj": "mlp.fc11",
    "mlp.gate_proj": "mlp.fc12",
    "mlp.down_proj": "mlp.fc2",
    "post_attention_layernorm": "norm1",
    "post_mlp_layernorm": "norm2",
}
NOMIC_FIELDS = {
    "architectures": ["NomicBertModel"],
    "model_type": "nomic_bert",
    "vocab_size": 60,
    "n_embd": 32,
    "n_inner": 48,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "layer_norm_epsilon": 1e-12,
    "activation_function": "swiglu",
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_scaling_factor": None,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "prenorm": False,
    "type_vocab_size": 2,
}


def published_nomic(folder: Path, **changes: Any) -> Path:
    """The golden as its maker names tensors and fields."""
    held = mx.load(str(ENCODER_GOLDENS / "nomic_bert" / "model.safetensors"))
    assert isinstance(held, dict)
    tensors: dict[str, mx.array] = {}
    for name, value in held.items():
        renamed = name.replace("layers.", "encoder.layers.")
        for ours, theirs in NOMIC_NAMES.items():
            renamed = renamed.replace(ours, theirs)
        tensors[renamed] = value
    for i in range(2):
        parts = [tensors.pop(f"encoder.layers.{i}.self_attn.{name}_proj.weight") for name in "qkv"]
        tensors[f"encoder.layers.{i}.attn.Wqkv.weight"] = mx.concatenate(parts)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    (folder / "config.json").write_text(json.dumps(NOMIC_FIELDS | changes))
    return folder


def test_nomics_own_names_of_tensors_and_fields_are_read(tmp_path: Path) -> None:
    model = load(published_nomic(tmp_path))
    for ids, wanted in expected("nomic_bert"):
        np.testing.assert_allclose(states(model, ids), wanted, atol=2e-5)


@pytest.mark.parametrize(
    ("field", "value"),
    [("rotary_scaling_factor", 2), ("rotary_emb_fraction", 0.5), ("prenorm", True), ("activation_function", "gelu")],
)
def test_a_variant_of_nomics_that_is_not_honoured_is_named(tmp_path: Path, field: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=field):
        load(published_nomic(tmp_path, **{field: value}))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"hidden_act": "relu6"}, "hidden_act"),
        ({"num_attention_heads": 5}, "num_attention_heads"),
        ({"is_decoder": True}, "is_decoder"),
        ({"is_causal": True}, "is_causal"),
        ({"hidden_size": 64}, "shape"),
        ({"num_hidden_layers": 3}, "encoder.layer.2"),
    ],
)
def test_a_configuration_that_does_not_fit_is_named(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    folder = tmp_path / "m"
    shutil.copytree(ENCODER_GOLDENS / "bert", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(CheckpointError, match=named):
        load(folder)


def test_encoders_are_known_by_class_and_by_type() -> None:
    assert check_config({"architectures": ["BertModel"]}) == "BertModel"
    assert check_config({"model_type": "xlm-roberta"}) == "XLMRobertaModel"
    assert {"BertModel", "XLMRobertaModel"} <= set(ENCODERS)


def test_modernberts_fields_of_its_first_files_mean_the_same(tmp_path: Path) -> None:
    shutil.copytree(ENCODER_GOLDENS / "modernbert", tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    config = json.loads(path.read_text())
    del config["layer_types"], config["rope_parameters"]
    older = {"global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0}
    path.write_text(json.dumps(config | older))
    model = load(tmp_path / "m")
    for ids, wanted in expected("modernbert"):
        np.testing.assert_allclose(states(model, ids), wanted, atol=2e-5)
    path.write_text(json.dumps(config | {"norm_bias": True}))
    with pytest.raises(CheckpointError, match="norm_bias"):
        load(tmp_path / "m")


def test_a_model_whose_files_leave_out_its_stem_gives_the_same_states(tmp_path: Path) -> None:
    golden = ENCODER_GOLDENS.parent / "goldens" / "llama_llama3_tied"
    held = mx.load(str(golden / "model.safetensors"))
    assert isinstance(held, dict)
    bare = {name.removeprefix("model."): tensor for name, tensor in held.items()}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), bare)
    shutil.copy(golden / "config.json", tmp_path)
    model: Any = load_model(Checkpoint.open(FolderSource(str(tmp_path))), mx.float32)
    with np.load(golden / "golden.npz") as file:
        np.testing.assert_allclose(whole(model, file["ids"].tolist()), file["logits"], rtol=0, atol=2e-4)
