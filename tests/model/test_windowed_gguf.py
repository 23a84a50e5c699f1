"""GGUF files of Cohere 2, its mixture and Laguna."""

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
from arriero.source import GGUFSource
from tests.helpers.forward import whole
from tests.helpers.gguf_files import Tensor, encode, gguf_bytes
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
    "attention.sliding_window": "sliding_window",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "logit_scale": "logit_scale",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # golden: (GGUF architecture, changes of the folder's configuration, further metadata)
    "cohere2": ("cohere2", {}, {"attention.sliding_window_pattern": [True, False, True, False]}),
    "cohere2_moe": (
        "cohere2moe",
        {},
        {
            "feed_forward_length": 48,
            "expert_feed_forward_length": 32,
            "expert_shared_feed_forward_length": 64,
            "expert_shared_count": 2,
            "leading_dense_block_count": 1,
            "expert_gating_func": 1,
            "expert_weights_norm": True,
            "attention.sliding_window_pattern": [False, True, False],
        },
    ),
    # Files mean an average, and positions in dense layers.
    "cohere2_moe_rms": (
        "cohere2moe",
        {"shared_expert_combination_strategy": "average", "prefix_dense_sliding_window_pattern": 1},
        {
            "rope.freq_base": 500.0,
            "feed_forward_length": 40,
            "expert_feed_forward_length": 32,
            "expert_shared_count": 1,
            "leading_dense_block_count": 1,
            "expert_gating_func": 2,
            "expert_weights_norm": True,
            "attention.sliding_window_pattern": [True, False, True],
        },
    ),
    "laguna": (
        "laguna",
        # Files have no cap.
        {"moe_router_logit_softcapping": None},
        {
            "rope.freq_base": 5000.0,
            "rope.freq_base_swa": 100.0,
            "rope.dimension_count": 8,
            "rope.dimension_count_swa": 16,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 16,
            "rope.scaling.yarn_beta_fast": 4.0,
            "attention.head_count": [4, 6, 2, 4],
            "attention.sliding_window_pattern": [False, True, True, False],
            "leading_dense_block_count": 1,
            "expert_feed_forward_length": 24,
            "expert_shared_feed_forward_length": 32,
            "expert_weights_norm": True,
            "expert_weights_scale": 2.5,
            "expert_gating_func": 2,
        },
    ),
}


def folder_of(name: str) -> MemoryCheckpoint:
    return MemoryCheckpoint.golden(GOLDENS / name).copy(**CASES[name][1])


def write(
    path: Path, name: str, *, more: dict[str, Any] | None = None, extra: dict[str, Tensor] | None = None
) -> Checkpoint:
    """A golden as a GGUF file, with `more` metadata (None: left out) and `extra` tensors."""
    architecture, _, case = CASES[name]
    folder = folder_of(name)
    keys = {key: folder.config[field] for key, field in KEYS.items() if folder.config.get(field) is not None}
    keys |= {"rope.freq_base": 10000.0} | case | (more or {})
    modules = {there: here for here, there in LAYER_NAMES[architecture].items()}
    modules |= {f"mlp.shared_expert.{kind}_proj": f"ffn_{kind}_shexp" for kind in ("gate", "up", "down")}
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    tensors = {}
    for tensor, array in numbers(folder).items():
        module, _, kind = tensor.rpartition(".")
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", module)
        if kind == "e_score_correction_bias":
            assert layer is not None
            stored = f"blk.{layer[1]}.exp_probs_b.bias"
        else:
            stored = f"blk.{layer[1]}.{modules[layer[2]]}.{kind}" if layer else f"{top[module]}.{kind}"
        tensors[stored] = encode("F32", array)
    named = {f"{architecture}.{key}": value for key, value in keys.items() if value is not None}
    path.write_bytes(gguf_bytes({"general.architecture": architecture} | named, tensors | (extra or {})))
    return Checkpoint.open(GGUFSource((str(path),)))


def ids(name: str) -> list[int]:
    with np.load(GOLDENS / name / "golden.npz") as file:
        found: list[int] = file["ids"].tolist()
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_gguf_file_gives_the_bits_of_the_folder(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    opened = write(tmp_path / "model.gguf", name)
    expected = whole(load_model(folder_of(name).typed(), mx.float32), ids(name))
    caplog.clear()
    np.testing.assert_array_equal(whole(load_model(opened, mx.float32), ids(name)), expected)
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        # Every fourth is full: of Cohere 2 the last of four, of the others the first.
        ("cohere2", ["sliding_attention"] * 3 + ["full_attention"]),
        ("laguna", ["full_attention"] + ["sliding_attention"] * 3),
        ("cohere2_moe", ["full_attention"] + ["sliding_attention"] * 2),
    ],
)
def test_without_a_pattern_every_fourth_layer_is_full(name: str, wanted: list[str], tmp_path: Path) -> None:
    opened = write(tmp_path / "model.gguf", name, more={"attention.sliding_window_pattern": None})
    assert opened.config["layer_types"] == wanted


def test_a_laguna_without_windows_is_full_everywhere(tmp_path: Path) -> None:
    opened = write(tmp_path / "model.gguf", "laguna", more={"attention.sliding_window": None})
    assert opened.config["layer_types"] == ["full_attention"] * 4


def test_a_softmax_of_all_experts_is_one_of_the_chosen_only_where_weights_sum_to_one(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    assert write(path, "cohere2_moe").config["expert_selection_fn"] == "softmax"
    more = {"expert_gating_func": 3, "expert_weights_norm": None}
    assert write(path, "cohere2_moe", more=more).config["expert_selection_fn"] == "softmax"
    assert write(path, "cohere2_moe", more={"expert_gating_func": None}).config["expert_selection_fn"] == "sigmoid"


def test_layers_that_predict_several_tokens_are_left_out_with_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ones = encode("F32", np.ones((48,), np.float32))
    more = {
        "block_count": 4,
        "nextn_predict_layers": 1,
        "attention.sliding_window_pattern": [False, True, False, True],
    }
    extra = {"blk.3.attn_norm.weight": ones, "blk.3.nextn.enorm.weight": ones}
    opened = write(tmp_path / "model.gguf", "cohere2_moe", more=more, extra=extra)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        model = load_model(opened, mx.float32)
    assert model.facts.layers == 3
    assert "the 1 layers that predict several tokens are not loaded" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("cohere2", {"attention.sliding_window": None}, "attention.sliding_window is missing or zero"),
        ("cohere2", {"attention.sliding_window_pattern": [True]}, "sliding_window_pattern has the unusable value"),
        ("cohere2", {"residual_scale": 2.0}, "residual_scale is 2.0, which is not supported"),
        ("cohere2_moe", {"expert_gating_func": 4}, "expert_gating_func has the unusable value 4"),
        ("cohere2_moe", {"expert_weights_norm": False}, "expert_gating_func has the unusable value 1"),
        ("cohere2_moe", {"expert_weights_scale": 2.0}, "expert_weights_scale has the unusable value 2"),
        (
            "cohere2_moe",
            {"expert_shared_feed_forward_length": 40},
            "expert_shared_feed_forward_length has the unusable",
        ),
        ("cohere2_moe", {"leading_dense_block_count": 4}, "4 dense ones, do not fit"),
        ("cohere2_moe", {"nextn_predict_layers": 3}, "3 of them for drafts"),
        ("cohere2_moe", {"expert_count": None}, "expert_count is missing or zero"),
        ("laguna", {"expert_gating_func": 1}, "expert_gating_func has the unusable value 1"),
        ("laguna", {"attention.head_count": [4, 6]}, "attention.head_count has the unusable value"),
        ("laguna", {"attention.head_count": ["x"] * 4}, "attention.head_count has the unusable value"),
        ("laguna", {"leading_dense_block_count": 5}, "leading_dense_block_count has the unusable value 5"),
        ("laguna", {"expert_weights_norm": False}, "`norm_topk_prob` should be true"),
        ("laguna", {"logit_scale": 2.0}, "logit_scale is 2.0, which is not supported"),
    ],
)
def test_metadata_that_cannot_be_are_refused_by_key(
    name: str, more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_model(write(tmp_path / "model.gguf", name, more=more), mx.float32)
