"""The random Flash Next of the GPU's bench: every tensor of the architecture, and what a step reads of it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from arriero.bench import gpu_flash_next as bench
from arriero.errors import UnsupportedFeature
from arriero.model.architectures import load_model

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "head_dim": 64,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "hc_lowrank": 64,
    "indexer_head_dim": 32,
    "indexer_budget": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 64,
    "ple_layer_ids": [1],
    "ple_embed_dim": 256,
    "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 4,
    "eos_token_id": 95,
    "full_attention_interval": 2,
    "rope_parameters": bench.TEXT["rope_parameters"] | {"mrope_section": [3, 3, 2]},
}


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(bench.checkpoint(bench.config(2, **SMALL)), mx.bfloat16)


def test_the_random_model_has_every_tensor_and_reads_a_prompt(model: Any) -> None:
    reader = bench.Reading(model, 0)
    reader.ids = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9], np.int32)
    assert reader.chunk().seconds > 0
    assert reader.left == 0
    assert reader.step() > 0
    assert reader.position == 16
    assert 0 <= reader.token.item() < 96


def test_a_step_reads_the_experts_that_a_token_takes() -> None:
    few, all_of_them = (bench.step_bytes(bench.config(2, **SMALL) | {"num_experts_per_tok": count}) for count in (2, 4))
    # Half of two layers' experts, gate, up and down, four bits and a scale for 16.
    assert all_of_them - few == 2 * (4 - 2) * 3 * 128 * 128 * (0.5 + 1 / 16)


def test_the_published_model_reads_six_gigabytes_a_token() -> None:
    assert 5.5e9 < bench.step_bytes(bench.config()) < 7e9


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arriero.kernels.device.cuda", lambda: None)
    with pytest.raises(UnsupportedFeature, match="nothing was measured"):
        bench.measure(2)


def test_the_kernels_are_back_after_plain_mlx() -> None:
    before = bench.indexed.takes
    with bench.without_blocks():
        assert not bench.indexed.takes(mx.zeros((1, 2, 64)), [], [], 3)
    assert bench.indexed.takes is before
