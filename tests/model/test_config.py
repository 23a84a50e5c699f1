"""Configurations that are wrong, incomplete or ask for what we don't do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from arriero.errors import CheckpointError
from arriero.model.architectures import load_model
from arriero.model.contract import ModelFacts
from arriero.model.layers.config import NEUTRAL
from tests.helpers.memory_checkpoint import MemoryCheckpoint

GOLDENS = Path(__file__).parent / "goldens"


def load(name: str, **changes: Any) -> ModelFacts:
    return load_model(MemoryCheckpoint.golden(GOLDENS / name).copy(**changes).typed(), mx.bfloat16).facts


@pytest.mark.parametrize(
    "field", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size"]
)
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(CheckpointError, match=f"config.json: `{field}` is missing"):
        load("llama", **{field: None})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "64"}, "`hidden_size` should be a whole number of at least 1, found '64'"),
        ({"num_hidden_layers": 0}, "`num_hidden_layers` should be a whole number"),
        ({"num_hidden_layers": True}, "`num_hidden_layers` should be a whole number"),
        ({"num_key_value_heads": 3}, "a divisor of num_attention_heads"),
        ({"rms_norm_eps": -1}, "`rms_norm_eps` should be a positive number"),
        ({"rms_norm_eps": float("nan")}, "`rms_norm_eps` should be a number"),
        ({"tie_word_embeddings": "no"}, "`tie_word_embeddings` should be true or false"),
        ({"hidden_act": "relu"}, "`hidden_act` should be one of silu"),
        ({"hidden_act": ["silu"]}, "`hidden_act` should be one of silu"),
        ({"num_hidden_layers": 10**12}, "`num_hidden_layers` should be at most 4096"),
        ({"head_dim": 10**12}, "`head_dim` should be at most 65536"),
        ({"max_position_embeddings": 10**30}, "`max_position_embeddings` should be at most 2147483647"),
        ({"rms_norm_eps": 10**400}, "`rms_norm_eps` should be a number"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "rope type .'yarn'."),
        ({"rope_parameters": [1]}, "`rope_parameters` should be an object"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2}}, "rope type 'dynamic'"),
    ],
)
def test_a_wrong_field_says_what_was_expected_and_found(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load("llama", **changes)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"attn_logit_softcapping": 50.0}),
        ("llama", {"logits_scaling": 8}),
        ("llama", {"num_local_experts": 8}),
        ("llama", {"no_rope_layers": [1, 0, 1]}),
        ("llama", {"layer_types": ["full_attention"] * 3}),
        ("qwen3", {"final_logit_softcapping": 30.0}),
        ("qwen3", {"num_experts": 8}),
        ("gemma3", {"use_bidirectional_attention": True}),
    ],
)
def test_a_field_that_changes_the_numbers_and_is_not_honoured_is_refused(name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=f"`{next(iter(changes))}` is .* does not honour"):
        load(name, **changes)


def test_neutral_values_of_such_fields_are_accepted() -> None:
    for field, values in NEUTRAL.items():
        for value in values:
            assert load("llama", **{field: value}).layers == 3


def test_windows_of_a_qwen_mixture_are_refused() -> None:
    with pytest.raises(CheckpointError, match="use_sliding_window"):
        load("qwen3_moe", use_sliding_window=True, sliding_window=8)


def test_more_chosen_experts_than_experts_are_refused() -> None:
    with pytest.raises(CheckpointError, match="at most the number of experts"):
        load("qwen3_moe", num_experts_per_tok=7)


def test_a_shape_that_contradicts_the_configuration_names_the_tensor() -> None:
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.gate_proj\.weight has shape \[96, 64\]"):
        load("llama", intermediate_size=128)
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight"):
        load("llama", vocab_size=100)


def test_a_missing_tensor_is_named() -> None:
    checkpoint = MemoryCheckpoint.golden(GOLDENS / "qwen3")
    del checkpoint.tensors["model.layers.1.self_attn.q_norm.weight"]
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.self_attn\.q_norm\.weight"):
        load_model(checkpoint.typed(), mx.bfloat16)


def test_declared_biases_must_exist() -> None:
    with pytest.raises(CheckpointError, match=r"self_attn\.q_proj\.bias"):
        load("llama", attention_bias=True)
    with pytest.raises(CheckpointError, match=r"mlp\.gate_proj\.bias"):
        load("llama", mlp_bias=True)


def test_facts_count_the_bytes_of_every_token() -> None:
    facts = load("llama")
    assert (facts.architecture, facts.vocab_size, facts.hidden_size, facts.layers) == ("LlamaForCausalLM", 128, 64, 3)
    assert facts.context_length == 512
    assert facts.dtype == mx.bfloat16
    assert facts.cache_bytes_per_token == 3 * 2 * 2 * 16 * 2
    assert facts.cache_bytes_fixed == 0


def test_facts_count_windows_apart() -> None:
    facts = load("gemma3", max_position_embeddings=4096)
    token = 2 * 2 * 16 * 2
    assert facts.cache_bytes_per_token == token
    assert facts.cache_bytes_fixed == 3 * token * (8 + 512)


def test_facts_give_the_context_that_yarn_was_declared_for() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    facts = load("qwen3", rope_parameters={}, rope_scaling=scaling, max_position_embeddings=40960)
    assert facts.context_length == 131072


def test_gemma_3_files_may_leave_out_what_their_size_implies() -> None:
    config = json.loads((GOLDENS / "gemma3" / "config.json").read_text())
    for field in ("num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"):
        del config[field]
    checkpoint = MemoryCheckpoint(config, MemoryCheckpoint.golden(GOLDENS / "gemma3").tensors)
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight .* says \[262208, 64\]"):
        load_model(checkpoint.typed(), mx.bfloat16)


@pytest.mark.parametrize("name", ["gemma3", "gemma4_31b", "qwen3_5"])
@pytest.mark.parametrize("tied", [True, False])
def test_what_is_said_outside_of_the_text_model_about_its_head_goes_before_what_is_said_inside(
    name: str, tied: bool
) -> None:
    checkpoint = MemoryCheckpoint.golden(GOLDENS / name)
    text = {**checkpoint.config, "tie_word_embeddings": not tied}
    outer = {key: checkpoint.config[key] for key in ("architectures", "model_type")}
    tensors = {key: value for key, value in checkpoint.tensors.items() if "lm_head" not in key}
    wrapped = MemoryCheckpoint({**outer, "text_config": text, "tie_word_embeddings": tied}, tensors)
    if tied:
        assert load_model(wrapped.typed(), mx.float32).facts.layers > 0
    else:
        with pytest.raises(CheckpointError, match=r"lm_head\.weight.*tie_word_embeddings: false"):
            load_model(wrapped.typed(), mx.float32)
