"""What only Laguna does: layouts of its files, gates whose rows decide their kind, ropes by type of layer, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from arriero.errors import CheckpointError
from arriero.model.architectures import load_model
from arriero.model.architectures.laguna import Config
from arriero.model.weight import Quantization
from arriero.runner.caches import KVCache, SlidingCache
from tests.helpers.forward import whole
from tests.helpers.memory_checkpoint import MemoryCheckpoint

pytestmark = pytest.mark.usefixtures("kernels")

GOLDENS = Path(__file__).parent / "goldens"


def golden(name: str) -> MemoryCheckpoint:
    return MemoryCheckpoint.golden(GOLDENS / name)


def logits(checkpoint: MemoryCheckpoint, name: str = "laguna") -> np.ndarray:
    with np.load(GOLDENS / name / "golden.npz") as file:
        return whole(load_model(checkpoint.typed(), mx.float32), file["ids"].tolist())


def repacked() -> MemoryCheckpoint:
    """The golden as tools for MLX write it: a wrapper's prefix, the router as a layer, experts in one bank each."""
    tensors: dict[str, Any] = {}
    banks: dict[str, list[mx.array]] = {}
    for name, value in sorted(golden("laguna").tensors.items()):
        assert isinstance(value, mx.array)
        owner, _, rest = name.partition(".experts.")
        if rest and rest[0].isdigit():
            banks.setdefault(f"{owner}.switch_mlp.{rest.split('.', 1)[1]}", []).append(value)
            continue
        name = name.replace("experts.e_score", "gate.e_score").replace("gate.weight", "gate.proj.weight")
        tensors[f"language_model.{name}"] = value
    tensors |= {f"language_model.{name}": mx.stack(values) for name, values in banks.items()}
    return MemoryCheckpoint(golden("laguna").config, tensors, "mlx")


def test_a_repacked_file_gives_the_same_logits() -> None:
    np.testing.assert_array_equal(logits(repacked()), logits(golden("laguna")))


def test_the_other_spelling_of_the_shared_expert_gives_the_same_logits() -> None:
    original = golden("laguna")
    renamed = {n.replace(".shared_expert.", ".shared_experts."): v for n, v in original.tensors.items()}
    assert set(renamed) != set(original.tensors)
    np.testing.assert_array_equal(logits(MemoryCheckpoint(original.config, renamed)), logits(original))


def test_packed_experts_give_what_their_numbers_say() -> None:
    name = "laguna_per_element"
    packed = golden(name).quantized(Quantization("affine", 8, 32), names="up_proj.weight")
    dense = packed.dequantized()
    np.testing.assert_allclose(logits(packed, name), logits(dense, name), rtol=0, atol=2e-4)
    assert not np.array_equal(logits(dense, name), logits(golden(name), name))


def test_a_gate_of_another_format_than_the_projections_gives_the_same_logits() -> None:
    name = "laguna_per_element"
    packed = golden(name).copy(attention_bias=False)
    packed.tensors = {n: v for n, v in packed.tensors.items() if not n.endswith("_proj.bias")}
    mixed = packed.quantized(Quantization("affine", 8, 32), names="v_proj.weight")
    for checkpoint in (packed, mixed):
        attention: Any = load_model(checkpoint.typed(), mx.float32).layers[0].mixer  # type: ignore[attr-defined]
        assert (attention.gate is None) == (checkpoint is packed)
    np.testing.assert_allclose(logits(mixed, name), logits(mixed.dequantized(), name), rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", ["laguna", "laguna_per_element"])
def test_gating_true_means_what_the_rows_of_the_gate_say(name: str) -> None:
    np.testing.assert_array_equal(logits(golden(name).copy(gating=True), name), logits(golden(name), name))


def test_the_kind_of_a_gate_may_be_said_layer_by_layer() -> None:
    types = ["per_head", "per-head", "per_head", "per_head"]
    assert Config.read(golden("laguna").copy(gating_types=types).config).gating == ["per-head"] * 4
    with pytest.raises(CheckpointError, match=r"1\.self_attn\.g_proj\.weight.*gating: 'per-element'"):
        logits(golden("laguna").copy(gating_types=[types[0], "per_element", *types[2:]]))
    with pytest.raises(CheckpointError, match="`gating_types` should be a list of 4"):
        logits(golden("laguna").copy(gating_types=["none"] * 4))


def test_a_gate_that_contradicts_the_configuration_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"0\.self_attn\.g_proj\.weight has shape \[4, 48\].*per-element"):
        logits(golden("laguna").copy(gating="per-element"))
    broken = golden("laguna").copy(gating=True)
    broken.tensors["model.layers.1.self_attn.g_proj.weight"] = mx.zeros((4, 48))
    with pytest.raises(CheckpointError, match=r"says \[6, 48\] or \[96, 48\]"):
        logits(broken)


def test_each_layer_has_its_own_heads_and_windowed_layers_a_window() -> None:
    config = Config.read(golden("laguna").config)
    assert [a.heads for a in config.attention] == [4, 6, 2, 4]
    assert [a.window for a in config.attention] == [None, 8, 8, None]
    caches = load_model(golden("laguna").typed(), mx.float32).new_caches()
    assert [type(cache) for cache in caches] == [KVCache, SlidingCache, SlidingCache, KVCache]


def test_the_rope_of_a_type_of_layer_is_found_wherever_it_is_said() -> None:
    nested = golden("laguna").config["rope_parameters"]
    full, sliding = nested["full_attention"], nested["sliding_attention"]
    for changes in (
        {"rope_parameters": {**nested, "rope_theta": 12345.0, "rope_type": "default"}},
        {"rope_parameters": full, "swa_rope_parameters": sliding},
    ):
        np.testing.assert_array_equal(logits(golden("laguna").copy(**changes)), logits(golden("laguna")))


def test_without_a_word_about_ropes_both_types_have_their_defaults() -> None:
    ropes = Config.read(golden("laguna").copy(rope_parameters=None).config).ropes
    assert (ropes["full_attention"].theta, ropes["full_attention"].partial) == (500000.0, 0.5)
    assert (ropes["sliding_attention"].theta, ropes["sliding_attention"].partial) == (10000.0, 1.0)


def test_without_types_of_feed_forward_parts_only_the_first_is_dense() -> None:
    assert Config.read(golden("laguna").copy(mlp_layer_types=None).config).sparse == [False, True, True, True]
    named = golden("laguna").copy(mlp_layer_types=None, mlp_only_layers=[0, 2])
    assert Config.read(named.config).sparse == [False, True, False, True]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gating": "per-layer"}, "`gating` should be true, 'per-head' or 'per-element'"),
        ({"gating": False}, "`gating` should be true"),
        ({"hidden_act": "gelu"}, "`hidden_act` should be silu"),
        ({"num_attention_heads_per_layer": [4, 6, 2]}, "`num_attention_heads_per_layer` should be 4 multiples"),
        ({"num_attention_heads_per_layer": [4, 5, 2, 4]}, "`num_attention_heads_per_layer` should be 4 multiples"),
        ({"layer_types": ["full_attention"] * 3}, "`layer_types` should be a list of 4"),
        ({"mlp_layer_types": ["dense"] * 3}, "`mlp_layer_types` should be a list of 4"),
        ({"mlp_layer_types": None, "mlp_only_layers": ["0"]}, "`mlp_only_layers` should be a list of layer numbers"),
        ({"sliding_window": 0}, "`sliding_window` should be at least 1"),
        ({"num_experts_per_tok": 9}, "`num_experts_per_tok` should be at most the number of experts"),
        ({"moe_router_score_func": "sqrtsoftplus"}, "`moe_router_score_func` should be sigmoid"),
        ({"moe_apply_router_weight_on_input": True}, "`moe_apply_router_weight_on_input` should be false"),
        ({"swa_attention_sink_enabled": True}, "`swa_attention_sink_enabled` should be false"),
        ({"norm_topk_prob": False}, "`norm_topk_prob` should be true"),
        ({"rope_parameters": None, "rope_theta": 1e4}, "`rope_parameters` should be given where rope_theta is"),
        ({"rope_parameters": {"full_attention": {}, "sliding_attention": 3}}, "sliding_attention` should be an object"),
        ({"rope_scaling": {"factor": 2.0}}, "`rope_scaling` is .* which LagunaForCausalLM does not honour"),
    ],
)
def test_what_is_wrong_or_not_honoured_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        logits(golden("laguna").copy(**changes))


@pytest.mark.parametrize(
    "name",
    [
        "1.mlp.gate.weight",
        "2.mlp.experts.e_score_correction_bias",
        "1.mlp.shared_expert.up_proj.weight",
        "0.self_attn.g_proj.weight",
    ],
)
def test_a_missing_tensor_is_named(name: str) -> None:
    checkpoint = golden("laguna")
    del checkpoint.tensors[f"model.layers.{name}"]
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        logits(checkpoint)
