"""What only Cohere 2 does: layers without positions, its patterns of layers, norms of two kinds, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from arriero.errors import CheckpointError
from arriero.model.architectures import load_model
from arriero.model.architectures.cohere2 import Config
from arriero.model.layers.norm import LayerNorm
from tests.helpers.forward import whole
from tests.helpers.memory_checkpoint import MemoryCheckpoint

pytestmark = pytest.mark.usefixtures("kernels")

GOLDENS = Path(__file__).parent / "goldens"


def golden(name: str) -> MemoryCheckpoint:
    return MemoryCheckpoint.golden(GOLDENS / name)


def logits(checkpoint: MemoryCheckpoint, name: str) -> np.ndarray:
    with np.load(GOLDENS / name / "golden.npz") as file:
        return whole(load_model(checkpoint.typed(), mx.float32), file["ids"].tolist())


def config(name: str, **changes: Any) -> Config:
    return Config.read(golden(name).copy(**changes).config)


def test_full_layers_have_no_positions() -> None:
    assert config("cohere2").rotated == [True, False, True, False]


def test_dense_layers_in_front_of_a_mixture_have_positions_only_where_all_of_them_are_full() -> None:
    assert config("cohere2_moe").rotated == [True, True, False]
    assert config("cohere2_moe", prefix_dense_sliding_window_pattern=4).rotated == [False, True, False]


def test_a_dense_layer_of_the_dense_model_has_no_positions_because_of_that() -> None:
    assert config("cohere2", layer_types=["full_attention"] * 4).rotated == [False] * 4


def test_without_types_the_pattern_counts_from_behind_the_dense_layers() -> None:
    changes = {"layer_types": None, "mlp_layer_types": None, "first_k_dense_replace": 2, "num_hidden_layers": 7}
    found = config("cohere2_moe", **changes, sliding_window_pattern=3)
    assert [a.window for a in found.attention] == [None, None, 8, 8, None, 8, 8]
    assert found.dense == [48, 48, 0, 0, 0, 0, 0]
    assert [a.window for a in config("cohere2", layer_types=None).attention] == [8, 8, 8, None]


def test_a_missing_window_is_4096_and_a_null_one_is_none() -> None:
    assert config("cohere2", sliding_window=None).attention[0].window == 4096
    values = {**golden("cohere2").config, "sliding_window": None}
    found = Config.read(values)
    assert found.attention[0].window is None
    assert not any(found.rotated)


def test_only_a_mixture_with_an_epsilon_for_it_has_norms_without_mean() -> None:
    assert [config(name).means for name in ("cohere2", "cohere2_moe", "cohere2_moe_rms")] == [True, True, False]
    assert config("cohere2", rms_norm_eps=1e-5).means


def test_a_norm_takes_the_mean_away_in_float32() -> None:
    x = mx.array([[1000.0, 1001.0, 1002.0, 1003.0]]).astype(mx.bfloat16)
    norm = LayerNorm(mx.array([1.0, 2.0, 1.0, 1.0]).astype(mx.bfloat16), 1e-5)
    exact = np.array(x.astype(mx.float32))
    wanted = (exact - exact.mean()) / np.sqrt(exact.var() + 1e-5) * [1, 2, 1, 1]
    found = norm(x)
    assert found.dtype == mx.bfloat16
    np.testing.assert_allclose(np.array(found.astype(mx.float32)), wanted, rtol=0.005)


def test_logits_are_scaled_and_raw_ones_are_not() -> None:
    model = load_model(golden("cohere2").typed(), mx.float32)
    hidden = mx.random.normal((3, 64))
    np.testing.assert_array_equal(np.array(model.logits(hidden)), np.array(model.raw_logits(hidden) * 0.25))


def test_weights_that_are_not_normalised_are_bare_sigmoids() -> None:
    rms = golden("cohere2_moe_rms")
    assert not np.allclose(
        logits(rms.copy(norm_topk_prob=False), "cohere2_moe_rms"), logits(rms, "cohere2_moe_rms"), atol=1e-3
    )


def test_experts_in_one_bank_give_the_same_logits() -> None:
    original, tensors, banks = golden("cohere2_moe"), {}, {}
    for name, value in original.tensors.items():
        owner, _, rest = name.partition(".experts.")
        if rest:
            number, kind = rest.split(".", 1)
            banks.setdefault(owner, {})[int(number), kind.split(".")[0]] = value
        else:
            tensors[name] = value
    for owner, parts in banks.items():
        count = len(parts) // 3
        both = [mx.concatenate([parts[i, "gate_proj"], parts[i, "up_proj"]]) for i in range(count)]
        tensors[f"{owner}.experts.gate_up_proj"] = mx.stack(both)
        tensors[f"{owner}.experts.down_proj"] = mx.stack([parts[i, "down_proj"] for i in range(count)])
    found = logits(MemoryCheckpoint(original.config, tensors), "cohere2_moe")
    np.testing.assert_array_equal(found, logits(original, "cohere2_moe"))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("cohere2", {"use_parallel_block": False}, "`use_parallel_block` should be True"),
        ("cohere2", {"use_gated_activation": False}, "`use_gated_activation` should be True"),
        ("cohere2", {"rotary_pct": 0.5}, r"`rotary_pct` should be 1\.0"),
        ("cohere2", {"position_embedding_type": "rope"}, "`position_embedding_type` should be 'rope_gptj'"),
        ("cohere2", {"layer_norm_bias": True}, "`layer_norm_bias` should be False"),
        ("cohere2", {"use_qk_norm": True}, "`use_qk_norm` is True, which Cohere2ForCausalLM does not honour"),
        ("cohere2", {"num_experts": 4}, "`num_experts` is 4, which Cohere2ForCausalLM does not honour"),
        ("cohere2_moe", {"expert_selection_fn": "tanh"}, "`expert_selection_fn` should be softmax or sigmoid"),
        ("cohere2_moe", {"shared_expert_combination_strategy": "max"}, "should be average or sum"),
        ("cohere2_moe", {"num_experts_per_tok": 6}, "`num_experts_per_tok` should be at most"),
        ("cohere2_moe", {"mlp_layer_types": ["dense", "moe", "moe"]}, "`mlp_layer_types` should be a list of 3"),
    ],
)
def test_what_is_wrong_or_not_honoured_is_refused_by_name(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_model(golden(name).copy(**changes).typed(), mx.float32)
