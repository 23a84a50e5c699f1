"""DeepSeek V2 and V3, GLM-4 MoE and its lite variant: published files, routing, and what is refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest

from arriero.errors import CheckpointError
from arriero.formats import blockfp8
from arriero.model.architectures import load_model
from arriero.model.architectures.deepseek_v3 import Config, SoftmaxRouter
from arriero.model.checkpoint import Checkpoint
from arriero.model.layers.corrected_router import CorrectedRouterConfig
from arriero.model.layers.linear import Linear
from arriero.model.weight import Quantization, Weight
from arriero.source import FolderSource
from tests.helpers.checkpoint_folder import write_folder
from tests.helpers.forward import whole
from tests.helpers.latent import PUBLISHED, published_tensors
from tests.helpers.memory_checkpoint import MemoryCheckpoint

GOLDENS = Path(__file__).parent / "goldens"
LATENT = ["deepseek_v2", "deepseek_v3", "deepseek_v3_halves", "glm4_moe_lite"]
NAMES = [*LATENT, "glm4_moe", "glm4_moe_plain"]
IDS = [7, 99, 3, 3, 140, 25, 61, 8, 0, 77, 12, 149]


def golden(name: str, **changes: Any) -> MemoryCheckpoint:
    return MemoryCheckpoint.golden(GOLDENS / name).copy(**changes)


def ids(name: str) -> list[int]:
    with np.load(GOLDENS / name / "golden.npz") as file:
        found: list[int] = file["ids"].tolist()
    return found


def open_folder(folder: Path, tensors: dict[str, np.ndarray], **config: Any) -> Checkpoint:
    folder.mkdir()
    write_folder(folder, {"model.safetensors": tensors}, config=PUBLISHED | config)
    return Checkpoint.open(FolderSource(str(folder)))


def block_fp8(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes and float32 scales by block of 128 by 128, as DeepSeek publishes its matrices."""
    rows, columns = (-(-size // 128) for size in values.shape)
    padded = np.zeros((rows * 128, columns * 128), np.float32)
    padded[: values.shape[0], : values.shape[1]] = values
    blocks = padded.reshape(rows, 128, columns, 128)
    scales = np.abs(blocks).max(axis=(1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).reshape(padded.shape)[: values.shape[0], : values.shape[1]]
    return codes.astype(ml_dtypes.float8_e4m3fn), scales.astype(np.float32)


def published_fp8() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The file's tensors, and the numbers that they mean."""
    stored: dict[str, np.ndarray] = {}
    meant: dict[str, np.ndarray] = {}
    for name, values in published_tensors().items():
        if name.endswith("_proj.weight") and "eh_proj" not in name:
            codes, scales = block_fp8(values)
            stored |= {name: codes, f"{name}_scale_inv": scales}
            meant[name] = blockfp8.dequantize(codes.view(np.uint8), scales)
        else:
            correction = name.endswith("e_score_correction_bias")
            stored[name] = meant[name] = values if correction else values.astype(ml_dtypes.bfloat16)
    return stored, meant


def test_the_published_block_fp8_form_gives_the_bits_of_its_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Blocks end inside heads, and the last of each row and column is not whole."""
    stored, meant = published_fp8()
    with caplog.at_level(logging.INFO):
        model = load_model(open_folder(tmp_path / "fp8", stored), mx.float32)
        expected = whole(load_model(open_folder(tmp_path / "numbers", meant), mx.float32), IDS)
    np.testing.assert_array_equal(whole(model, IDS), expected)
    assert np.isfinite(expected).all()
    assert expected.std() > 0.1
    told = [record.getMessage() for record in caplog.records if "predict several tokens" in record.getMessage()]
    behind = sum(name.startswith("model.layers.2.") for name in meant)
    assert (
        told
        == [
            "DeepseekV3ForCausalLM: the 1 layers that predict several tokens are not loaded: drafts are not in this "
            f"version ({behind} tensors)"
        ]
        * 2
    )
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_layers_behind_the_last_that_no_field_declares_are_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = published_tensors()
    load_model(open_folder(tmp_path / "m", tensors, num_nextn_predict_layers=0), mx.float32)
    behind = sum(name.startswith("model.layers.2.") for name in tensors)
    assert f"does not use {behind} tensors" in caplog.text
    assert "model.layers.*.eh_proj.weight" in caplog.text


def test_a_layer_behind_those_that_are_declared_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = published_tensors()
    tensors["model.layers.3.eh_proj.weight"] = tensors["model.layers.2.eh_proj.weight"]
    load_model(open_folder(tmp_path / "m", tensors), mx.float32)
    assert "does not use 1 tensors of the checkpoint: model.layers.*.eh_proj.weight" in caplog.text


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_of_the_reference_is_used(name: str, caplog: pytest.LogCaptureFixture) -> None:
    load_model(golden(name).typed(), mx.float32)
    assert not caplog.records


@pytest.mark.parametrize("name", NAMES)
def test_every_number_of_the_file_is_counted_once(name: str) -> None:
    checkpoint = golden(name)
    model = load_model(checkpoint.typed(), mx.float32)
    held = sum(value.size for value in checkpoint.tensors.values() if isinstance(value, mx.array))
    assert sum(array.size for array in model.parameters()) == held


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_packed_models_are_the_models_of_their_numbers(name: str) -> None:
    packed = golden(name).quantized(Quantization("affine", 8, 32))
    tokens = ids(name)[:20]
    found, expected = (whole(load_model(c.typed(), mx.float32), tokens) for c in (packed, packed.dequantized()))
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("name", LATENT)
def test_a_row_takes_what_the_facts_say(name: str) -> None:
    facts = load_model(golden(name).typed(), mx.bfloat16).facts
    assert (facts.cache_bytes_per_token, facts.cache_bytes_fixed) == (facts.layers * (32 + 8) * 2, 0)


def test_a_context_is_what_yarn_was_declared_for() -> None:
    parameters = {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
    config = Config.read(golden("deepseek_v3", max_position_embeddings=4096, rope_parameters=parameters).config)
    facts = config.shape.facts(mx.float32, [config.attention], config.rope)
    assert facts.context_length == 163840


def test_first_layers_are_dense_by_number_type_or_interval() -> None:
    def sparse(**changes: Any) -> list[int]:
        return sorted(Config.read(golden("deepseek_v3", **changes).config).feed_forward.sparse)

    assert sparse() == [1, 2]
    assert sparse(first_k_dense_replace=None, num_hidden_layers=5) == [3, 4]
    assert sparse(first_k_dense_replace=0, moe_layer_freq=2) == [0, 2]
    assert sparse(mlp_layer_types=["sparse", "dense", "dense"]) == [0]
    lite = golden("glm4_moe_lite", mlp_layer_types=None)
    assert sorted(Config.read(lite.config).feed_forward.sparse) == [1, 2]


class TestSoftmaxRouter:
    """DeepSeek V2's: weights are the softmax over all experts, whatever takes part."""

    logits = np.array([[3.0, -2, -2, -2, 2, 1.9, 0, 2.5], [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]], np.float32)

    def choose(self, groups: int, kept: int, k: int) -> tuple[np.ndarray, np.ndarray]:
        config = CorrectedRouterConfig(8, k, groups, kept, False, 2.0)
        gate = Linear(Weight(mx.array(self.logits.T)))
        chosen, weights = SoftmaxRouter(config, gate)(mx.eye(2))
        assert weights.dtype == mx.float32
        return np.array(chosen), np.array(weights)

    def expected(self, chosen: np.ndarray) -> np.ndarray:
        scores = np.exp(self.logits) / np.exp(self.logits).sum(-1, keepdims=True)
        return np.asarray(2 * np.take_along_axis(scores, chosen.astype(np.int64), -1))

    def test_the_best_experts_are_taken_without_groups(self) -> None:
        chosen, weights = self.choose(1, 1, 3)
        assert chosen.tolist() == [[0, 7, 4], [7, 6, 5]]
        np.testing.assert_allclose(weights, self.expected(chosen), rtol=1e-5)

    def test_a_group_counts_by_its_best_expert(self) -> None:
        """By the sum of its two best, the first group of the first token would lose to the third."""
        chosen, weights = self.choose(4, 2, 3)
        assert chosen.tolist() == [[0, 7, 6], [7, 6, 5]]
        np.testing.assert_allclose(weights, self.expected(chosen), rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("deepseek_v3", {"scoring_func": "softmax"}, "`scoring_func` should be sigmoid, found 'softmax'"),
        ("deepseek_v3", {"topk_method": "greedy"}, "`topk_method` should be noaux_tc, found 'greedy'"),
        ("deepseek_v3", {"n_group": 3}, "`n_group` should be so that 8 experts"),
        ("deepseek_v3", {"num_experts_per_tok": 5}, "`num_experts_per_tok` should be at most 4"),
        ("deepseek_v3", {"n_routed_experts": None}, "`n_routed_experts` is missing"),
        ("deepseek_v3", {"num_key_value_heads": 1}, "`num_key_value_heads`"),
        ("deepseek_v3", {"hidden_act": "relu"}, "`hidden_act`"),
        ("deepseek_v3", {"mlp_layer_types": ["dense", "sparse"]}, "`mlp_layer_types`"),
        ("deepseek_v3", {"sliding_window": 8}, "`sliding_window` is 8, which DeepseekV3ForCausalLM does not honour"),
        ("deepseek_v3", {"partial_rotary_factor": 0.5}, "`partial_rotary_factor` should be 1"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "`topk_method` should be greedy or group_limited_greedy"),
        ("deepseek_v2", {"norm_topk_prob": True}, "`norm_topk_prob` should be false"),
        ("deepseek_v2", {"mlp_bias": True}, "`mlp_bias` is True"),
        ("glm4_moe", {"scoring_func": "softmax"}, "`scoring_func` should be sigmoid"),
        ("glm4_moe", {"n_shared_experts": -1}, "`n_shared_experts`"),
        ("glm4_moe", {"attention_multiplier": 2.0}, "`attention_multiplier` is 2.0"),
    ],
)
def test_what_is_wrong_or_not_honoured_is_refused_by_name(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_model(golden(name, **changes).typed(), mx.float32)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("deepseek_v3", "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("deepseek_v3", "model.layers.2.self_attn.kv_b_proj.weight"),
        ("deepseek_v3", "model.layers.1.mlp.shared_experts.up_proj.weight"),
        ("deepseek_v2", "model.layers.0.self_attn.q_proj.weight"),
        ("deepseek_v3_halves", "model.layers.0.self_attn.q_a_proj.bias"),
        ("glm4_moe", "model.layers.0.self_attn.q_norm.weight"),
        ("glm4_moe", "model.layers.0.self_attn.k_proj.bias"),
    ],
)
def test_a_missing_tensor_is_named(name: str, tensor: str) -> None:
    checkpoint = golden(name)
    del checkpoint.tensors[tensor]
    with pytest.raises(CheckpointError, match=tensor.replace(".", r"\.")):
        load_model(checkpoint.typed(), mx.float32)


def test_half_of_each_head_rotates_where_nothing_is_said() -> None:
    nothing = {"rope_type": "default", "rope_theta": 1e4}
    half = golden("glm4_moe", rope_parameters=nothing | {"partial_rotary_factor": 0.5})
    found, expected = (
        whole(load_model(c.typed(), mx.float32), ids("glm4_moe")[:12])
        for c in (golden("glm4_moe", rope_parameters=nothing), half)
    )
    np.testing.assert_array_equal(found, expected)


def test_models_run_with_no_shared_expert() -> None:
    checkpoint = golden("glm4_moe", n_shared_experts=0)
    checkpoint.tensors = {name: value for name, value in checkpoint.tensors.items() if "shared_experts" not in name}
    tokens = ids("glm4_moe")[:5]
    zeros = golden("glm4_moe")
    for name in zeros.tensors:
        if "shared_experts.down_proj" in name:
            zeros.tensors[name] = mx.zeros_like(zeros.tensors[name])
    found, expected = (whole(load_model(c.typed(), mx.float32), tokens) for c in (checkpoint, zeros))
    np.testing.assert_array_equal(found, expected)
