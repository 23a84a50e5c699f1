"""GGUF files of DeepSeek V2 and V3, GLM-4 MoE lite and GLM-4 MoE."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from arriero.errors import CheckpointError
from arriero.model.architectures import load_model
from arriero.model.checkpoint import Checkpoint
from arriero.model.gguf_names import LAYER_NAMES
from arriero.model.weight import Quantization
from arriero.source import GGUFSource
from tests.helpers.forward import whole
from tests.helpers.gguf_files import Tensor, decoded, encode, gguf_bytes
from tests.helpers.memory_checkpoint import MemoryCheckpoint
from tests.model.test_gguf_models import numbers

GOLDENS = Path(__file__).parent / "goldens"

KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
}
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 16,
    "rope.scaling.yarn_beta_fast": 4.0,
}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # golden: (GGUF architecture, changes of the folder's configuration, further metadata)
    "deepseek_v2": ("deepseek2", {}, YARN | {"rope.scaling.yarn_log_multiplier": 0.0707, "expert_gating_func": 1}),
    "deepseek_v3": (
        "deepseek2",
        # Files know one of the two numbers of YaRN's magnitude, and mean both.
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.2, "beta_fast": 4.0}
         | {"original_max_position_embeddings": 16, "mscale_all_dim": 1.2}},
        YARN | {"rope.scaling.yarn_log_multiplier": 0.12, "expert_gating_func": 2},
    ),
    # Its first layer has experts, its second none: files can't say that.
    "glm4_moe_lite": ("deepseek2", {"num_hidden_layers": 1}, {"rope.freq_base": 1e6}),
    "glm4_moe": ("glm4moe", {}, {"expert_gating_func": 2}),
    "glm4_moe_plain": ("glm4moe", {}, {}),
}  # fmt: skip


def metadata(config: dict[str, Any], architecture: str, *, split: bool) -> dict[str, Any]:
    keys: dict[str, Any] = {key: config[field] for key, field in KEYS.items() if config.get(field) is not None}
    keys["rope.freq_base"] = 10000.0
    if architecture == "deepseek2":
        rotated, rank = config["qk_rope_head_dim"], config["kv_lora_rank"]
        width, value = config["qk_nope_head_dim"] + rotated, config["v_head_dim"]
        keys |= {"rope.dimension_count": rotated, "attention.key_length": width, "attention.value_length": value}
        if split:
            keys |= {"attention.key_length_mla": width, "attention.value_length_mla": value}
            keys |= {"attention.key_length": rank + rotated, "attention.value_length": rank}
            keys["attention.head_count_kv"] = 1
    else:
        width = config["head_dim"]
        keys |= {"attention.key_length": width, "attention.value_length": width}
        keys["rope.dimension_count"] = int(width * config["rope_parameters"]["partial_rotary_factor"])
    return keys


def file_tensors(folder: MemoryCheckpoint, architecture: str, *, split: bool) -> dict[str, np.ndarray]:
    """Every tensor by the file's name, keys and values of latent attention in one matrix or split."""
    modules = {there: here for here, there in LAYER_NAMES[architecture].items()}
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    config, found = folder.config, {}
    for name, array in numbers(folder).items():
        module, _, kind = name.rpartition(".")
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", module)
        if layer is None:
            found[f"{top[module]}.{kind}"] = array
            continue
        if int(layer[1]) >= config["num_hidden_layers"]:
            continue
        stem = f"blk.{layer[1]}"
        if kind == "e_score_correction_bias":
            found[f"{stem}.exp_probs_b.bias"] = array
        elif split and module.endswith("kv_b_proj"):
            heads = array.reshape(config["num_attention_heads"], -1, array.shape[-1])
            keys, values = np.split(heads, [config["qk_nope_head_dim"]], axis=1)
            found |= {f"{stem}.attn_k_b.weight": keys.swapaxes(1, 2), f"{stem}.attn_v_b.weight": values}
        else:
            found[f"{stem}.{modules[layer[2]]}.{kind}"] = array
    return found


def folder_of(name: str) -> MemoryCheckpoint:
    """The golden as the file will say it; layers that are left out take their tensors with them."""
    changes = dict(CASES[name][1])
    if name == "glm4_moe_lite":
        changes |= {"mlp_layer_types": ["sparse"], "first_k_dense_replace": 0}
    return MemoryCheckpoint.golden(GOLDENS / name).copy(**changes)


def write(
    path: Path,
    name: str,
    *,
    split: bool = True,
    more: dict[str, Any] | None = None,
    extra: dict[str, Tensor] | None = None,
) -> Checkpoint:
    """A golden as a GGUF file, with `more` metadata (None: left out) and `extra` tensors, which replace its own."""
    architecture, _, case = CASES[name]
    folder = folder_of(name)
    keys = metadata(folder.config, architecture, split=split) | case | (more or {})
    tensors = {key: encode("F32", values) for key, values in file_tensors(folder, architecture, split=split).items()}
    named = {f"{architecture}.{key}": value for key, value in keys.items() if value is not None}
    path.write_bytes(gguf_bytes({"general.architecture": architecture} | named, tensors | (extra or {})))
    return Checkpoint.open(GGUFSource((str(path),)))


def ids(name: str) -> list[int]:
    with np.load(GOLDENS / name / "golden.npz") as file:
        found: list[int] = file["ids"].tolist()
    return found


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_a_gguf_file_gives_the_bits_of_the_folder(
    name: str, split: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    opened = write(tmp_path / "model.gguf", name, split=split)
    expected = whole(load_model(folder_of(name).typed(), mx.float32), ids(name))
    caplog.clear()
    np.testing.assert_array_equal(whole(load_model(opened, mx.float32), ids(name)), expected)
    assert not caplog.records


@pytest.mark.parametrize("split", [True, False])
def test_packed_matrices_of_the_heads_give_what_their_numbers_give(split: bool, tmp_path: Path) -> None:
    """Those for values stay packed; out of the one matrix, those for keys are decoded."""
    name, module = "deepseek_v3", "attn_v_b" if split else "attn_kv_b"
    tensors = file_tensors(folder_of(name), "deepseek2", split=split)
    packed = {key: encode("Q8_0", values) for key, values in tensors.items() if module in key}
    meant = {key: encode("F32", decoded(tensor).reshape(tensors[key].shape)) for key, tensor in packed.items()}
    models = [
        load_model(write(tmp_path / f"{index}.gguf", name, split=split, extra=extra), mx.float32)
        for index, extra in enumerate((packed, meant))
    ]
    found, expected = (whole(model, ids(name)) for model in models)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)
    attention = models[0].layers[0].mixer
    assert attention.value_up.weight.quantization == Quantization("affine", 8, 32)
    assert attention.key_up.weight.quantization is None


def test_files_without_a_gating_function_are_told_by_their_corrections(tmp_path: Path) -> None:
    for name, architecture in {"deepseek_v3": "DeepseekV3ForCausalLM", "deepseek_v2": "DeepseekV2ForCausalLM"}.items():
        opened = write(tmp_path / f"{name}.gguf", name, more={"expert_gating_func": None})
        assert opened.config["architectures"] == [architecture]


def test_a_rank_of_queries_without_their_latent_is_not_taken(tmp_path: Path) -> None:
    opened = write(tmp_path / "model.gguf", "deepseek_v2", more={"attention.q_lora_rank": 24})
    assert "q_lora_rank" not in opened.config
    load_model(opened, mx.float32)


def test_layers_that_predict_several_tokens_are_left_out_with_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ones = encode("F32", np.ones((48,), np.float32))
    extra = {"blk.3.attn_norm.weight": ones, "blk.3.nextn.enorm.weight": ones}
    for name in ("deepseek_v3", "glm4_moe"):
        more = {"block_count": 4, "nextn_predict_layers": 1}
        opened = write(tmp_path / f"{name}.gguf", name, more=more, extra=extra)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            model = load_model(opened, mx.float32)
        assert model.facts.layers == 3
        assert "the 1 layers that predict several tokens are not loaded" in caplog.text
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("deepseek_v3", {"expert_gating_func": 7}, "expert_gating_func has the unusable value 7"),
        ("deepseek_v3", {"rope.dimension_count": 24}, "rope.dimension_count has the unusable value 24"),
        ("deepseek_v3", {"attention.kv_lora_rank": None}, "attention.kv_lora_rank is missing or zero"),
        ("deepseek_v3", {"attention.temperature_scale": 0.1}, "temperature_scale is set, which is not supported"),
        ("deepseek_v3", {"nextn_predict_layers": 3}, "3 of them for drafts, do not fit"),
        ("deepseek_v3", {"expert_feed_forward_length": [24, 24, 32]}, "expert_feed_forward_length differs"),
        ("deepseek_v3", {"expert_count": None}, "expert_count is missing or zero"),
        ("glm4_moe", {"expert_gating_func": 1}, "expert_gating_func has the unusable value 1"),
    ],
)
def test_metadata_that_cannot_be_are_refused_by_key(
    name: str, more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_model(write(tmp_path / "model.gguf", name, more=more), mx.float32)
