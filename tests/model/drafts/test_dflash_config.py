"""Configurations of block drafts: every published layout is read, and a draft of another model is refused."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from arriero.errors import CheckpointError
from arriero.model.contract import Model
from arriero.model.drafts import load_draft
from arriero.model.drafts.dflash import BlockDraft
from arriero.model.drafts.dflash_config import Config
from arriero.model.weight import Quantization
from tests.helpers.drafts import Picks, draft_checkpoint, golden_of, one_row, target_of
from tests.helpers.memory_checkpoint import MemoryCheckpoint

FULL = draft_checkpoint("dflash_full").config
QWEN38_27B: dict[str, Any] = {
    "architectures": ["DFlash2DraftModel"],
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 248320,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "layer_types": ["sliding_attention"] * 5,
    "sliding_window": 2048,
    "is_causal": False,
    "num_target_layers": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000},
    "dflash_config": {
        "block_size": 8,
        "mask_token_id": 248070,
        "target_layer_ids": [5, 19, 33, 47, 61],
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 256,
        "selector_top_k": 16,
    },
}


def config(**changes: Any) -> Config:
    """The tiny full-attention draft's, with some fields changed (None removes one)."""
    values = {**FULL, **changes}
    return Config.read({key: value for key, value in values.items() if value is not None})


def nested(**changes: Any) -> dict[str, Any]:
    values = {**FULL["dflash_config"], **changes}
    return {key: value for key, value in values.items() if value is not None}


def load(checkpoint: MemoryCheckpoint, target: Model) -> BlockDraft:
    found = load_draft(checkpoint.typed(), target, mx.float32)
    assert isinstance(found, BlockDraft)
    return found


def test_the_published_dflash2_is_read() -> None:
    found = Config.read(QWEN38_27B)
    assert (found.block, found.mask, found.taps) == (8, 248070, (5, 19, 33, 47, 61))
    assert found.causal == [False] * 5
    assert {layer.window for layer in found.attention} == {2048}
    assert found.conv is not None
    assert found.selector is not None
    assert (found.conv.taps, found.conv.group, found.selector.rank, found.selector.top_k) == (2, 16, 256, 16)
    assert found.rope.theta == 1e7


@pytest.mark.parametrize(
    ("target_layers", "layers", "expected"),
    [(36, 5, (1, 9, 17, 25, 33)), (32, 5, (1, 8, 15, 22, 29)), (64, 5, (1, 16, 31, 46, 61)), (40, 1, (20,))],
)
def test_taps_that_are_not_named_are_spread_over_the_target(
    target_layers: int, layers: int, expected: tuple[int, ...]
) -> None:
    found = config(
        dflash_config=nested(target_layer_ids=None),
        num_target_layers=target_layers,
        num_hidden_layers=layers,
        layer_types=None,
    )
    assert found.taps == expected


def test_what_the_nested_object_says_goes_before_the_top_level() -> None:
    found = config(block_size=16, mask_token_id=3, final_logit_softcapping=30.0, num_target_layers=9)
    assert (found.block, found.mask, found.logit_cap) == (6, 127, 30.0)
    found = config(dflash_config=nested(block_size=None, num_target_layers=3, final_logit_softcapping=5), block_size=4)
    assert (found.block, found.target_layers, found.logit_cap) == (4, 3, 5.0)
    assert config(dflash_config=nested(block_size=None)).block == 16


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, [True, False]),
        ({"is_causal": False}, [False, False]),
        ({"is_causal": True}, [True, True]),
        ({"dflash_config": nested(causal=True)}, [True, True]),
        ({"dflash_query_causal": False}, [False, False]),
        ({"sliding_window_non_causal": True}, [False, False]),
        ({"sliding_window_non_causal": False}, [True, True]),
    ],
)
def test_absent_is_not_false_for_causal_blocks(said: dict[str, Any], expected: list[bool]) -> None:
    found = config(**{"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 99, **said})
    assert found.causal == expected


def test_causal_fields_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(CheckpointError, match="is_causal"):
        config(is_causal=False, dflash_config=nested(causal=True))


@pytest.mark.parametrize(
    "said",
    [
        {"rope_theta": 5e6, "rope_parameters": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}},
        {"rope_parameters": None, "rope_scaling": {"rope_type": "default", "rope_theta": 5e6}},
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e6,
                "partial_rotary_factor": 0.25,
                "mrope_section": [11, 11, 10],
                "mrope_interleaved": True,
            },
            "partial_rotary_factor": 0.25,
        },
    ],
)
def test_the_base_of_the_rotation_is_found_wherever_it_is_and_whole_heads_turn(said: dict[str, Any]) -> None:
    rope = config(**said).rope
    assert (rope.theta, rope.partial, rope.kind) == (5e6, 1.0, "default")


def test_lagunas_drafts_turn_what_their_configuration_says_for_their_type_of_layer() -> None:
    laguna = draft_checkpoint("dflash_laguna").config
    full = {"rope_type": "default", "rope_theta": 5e5}
    sliding = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    rope = Config.read(laguna | {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}).rope
    assert (rope.theta, rope.partial) == (1e4, 0.5)
    rope = Config.read(laguna | {"rope_parameters": full}).rope
    assert (rope.theta, rope.partial) == (5e5, 1.0)
    bare = {key: value for key, value in laguna.items() if key != "rope_parameters"}
    assert Config.read(bare | {"rope_theta": 7e5}).rope.theta == 7e5
    windowed = {"rope_parameters": full, "swa_rope_parameters": sliding}
    assert Config.read(bare | windowed).rope.theta == 1e4
    with pytest.raises(CheckpointError, match=r"layer_types.*one type"):
        Config.read(laguna | {"layer_types": ["full_attention", "sliding_attention"]})
    with pytest.raises(CheckpointError, match=r"gating.*per-head.*per-element"):
        Config.read(laguna | {"gating": "per-element"})


def test_a_rotation_of_yarn_is_honoured() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e7, "factor": 64, "original_max_position_embeddings": 4096}
    assert config(rope_parameters=yarn).rope.kind == "yarn"


def test_neighbours_may_form_the_rotated_pairs() -> None:
    assert not config().interleaved
    assert config(rope_interleaved=True).interleaved
    assert config(rope_is_neox_style=False).interleaved


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dflash_config": nested(projector_type="domino")}, "projector_type.*domino"),
        ({"dflash_config": nested(markov_rank=256)}, "markov_rank.*256"),
        ({"dflash_config": nested(sample_from_anchor=True)}, "sample_from_anchor"),
        ({"attention_sink_bias": True}, "attention_sink_bias"),
        ({"draft_vocab_size": 64}, r"draft_vocab_size.*vocab_size \(128\).*found 64"),
        ({"dflash_config": nested(mask_token_id=None)}, "mask_token_id.*missing"),
        ({"dflash_config": nested(block_size=1)}, "block_size.*at least 2"),
        ({"dflash_config": nested(target_layer_ids=[0, -1])}, "target_layer_ids"),
        ({"dflash_config": nested(target_layer_ids=None), "num_target_layers": None}, "are missing"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window.*missing"),
        (
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5, "is_causal": False},
            r"block_size.*sliding_window \(5\), found 6",
        ),
        ({"architectures": ["DFlash2DraftModel"]}, "conv_kernel_size.*missing"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e6}}, "longrope"),
        ({"hidden_act": "relu2"}, "hidden_act"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        config(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 48}, "hidden_size is 48 .* and 64 in the model"),
        ({"vocab_size": 151936}, "vocab_size is 151936 .* and 128 in the model"),
        ({"num_target_layers": 36}, "number of layers is 36 .* and 3 in the model"),
        ({"dflash_config": nested(target_layer_ids=[0, 3])}, r"layers \[0, 3\], but the model has layers 0 to 2"),
        ({"dflash_config": nested(target_layer_ids=[1, 0])}, r"ascending layer numbers, found \[1, 0\]"),
        ({"dflash_config": nested(mask_token_id=151669)}, "mask_token_id is 151669, but .* 128 rows"),
        ({"dflash_config": nested(target_layer_ids=[0])}, r"fc\.weight has shape \[64, 128\], .* \[64, 64\]"),
    ],
)
def test_a_draft_of_another_model_is_refused_with_both_numbers(changes: dict[str, Any], message: str) -> None:
    target = target_of("dflash_full")
    with pytest.raises(CheckpointError, match=message):
        load(draft_checkpoint("dflash_full").copy(**changes), target)


def test_a_tensor_of_a_relative_is_refused() -> None:
    checkpoint, target = draft_checkpoint("dflash_full"), target_of("dflash_full")
    checkpoint.tensors["markov_head.markov_w1.weight"] = mx.zeros((2, 2))
    with pytest.raises(CheckpointError, match=r"1 tensors .*markov_head\.markov_w1\.weight: it is a draft of another"):
        load(checkpoint, target)


def test_a_dflash2_that_calls_itself_dflash_is_refused() -> None:
    checkpoint, target = draft_checkpoint("dflash2").copy(architectures=["DFlashDraftModel"]), target_of("dflash2")
    with pytest.raises(CheckpointError, match="11 tensors that DFlashDraftModel does not have"):
        load(checkpoint, target)


def test_a_head_of_its_own_is_used_where_the_configuration_asks_for_it_only() -> None:
    checkpoint, target = draft_checkpoint("dflash_scaled"), target_of("dflash_scaled")
    states = mx.array(golden_of("dflash_scaled")["states0"][1:])
    own = load(checkpoint, target).logits(states)
    untied = load(checkpoint.copy(has_lm_head=None, tie_word_embeddings=False), target).logits(states)
    np.testing.assert_array_equal(np.array(own), np.array(untied))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: it is a draft of another kind"):
        load(checkpoint.copy(has_lm_head=False), target)
    del checkpoint.tensors["lm_head.weight"]
    with pytest.raises(CheckpointError, match=r"has_lm_head.* is true, .*does not hold lm_head\.weight"):
        load(checkpoint.copy(), target)
    shared = load(checkpoint.copy(has_lm_head=None), target).logits(states)
    np.testing.assert_array_equal(np.array(shared), np.array(target.raw_logits(states)))


def test_a_table_of_its_own_is_used_and_must_be_there() -> None:
    checkpoint, target = draft_checkpoint("dflash_full"), target_of("dflash_full")
    with pytest.raises(CheckpointError, match=r"has_embed_tokens.* is True, .*does not hold"):
        load(checkpoint.copy(has_embed_tokens=True), target)
    table = mx.random.normal((128, 64), key=mx.random.key(1))
    checkpoint.tensors["embed_tokens.weight"] = table
    draft = load(checkpoint.copy(), target)
    np.testing.assert_array_equal(np.array(draft.embed(mx.array([5, 9]))), np.array(table[mx.array([5, 9])]))
    with pytest.raises(CheckpointError, match=r"has_embed_tokens.* is False, .*holds"):
        load(checkpoint.copy(has_embed_tokens=False), target)


def test_gemmas_rows_are_scaled_as_the_target_scales_them_unless_the_draft_says_how() -> None:
    tokens, target = mx.array([3, 4]), target_of("dflash_gemma4")
    checkpoint = draft_checkpoint("dflash_gemma4")
    rows = np.array(target.embed(tokens))
    np.testing.assert_array_equal(np.array(load(checkpoint, target).embed(tokens)), rows * 8)
    said = checkpoint.copy(dflash_config={**checkpoint.config["dflash_config"], "input_embedding_scale": 2.0})
    np.testing.assert_array_equal(np.array(load(said, target).embed(tokens)), rows * 2)


@pytest.mark.parametrize("root", ["", "model."])
def test_names_may_have_a_root_and_queries_keys_and_values_one_tensor(root: str) -> None:
    checkpoint, target, golden = draft_checkpoint("dflash_full"), target_of("dflash_full"), golden_of("dflash_full")
    for layer in range(2):
        prefix = f"layers.{layer}.self_attn"
        parts = [checkpoint.tensors.pop(f"{prefix}.{part}_proj.weight") for part in "qkv"]
        checkpoint.tensors[f"{prefix}.qkv_proj.weight"] = mx.concatenate([p for p in parts if isinstance(p, mx.array)])
    tensors = {root + name: value for name, value in checkpoint.tensors.items()}
    draft = load(MemoryCheckpoint(checkpoint.config, tensors), target)
    tokens = draft.propose(
        one_row([0] * 14, 0, draft.new_caches()),
        mx.array(golden["taps"][:14]),
        mx.array([int(golden["anchor0"])]),
        5,
        Picks(),
    )
    assert tokens.tolist() == golden["path0"].tolist()


def test_projections_may_have_biases_and_pairs_may_be_neighbours() -> None:
    checkpoint, target, taps = (
        draft_checkpoint("dflash_full"),
        target_of("dflash_full"),
        golden_of("dflash_full")["taps"],
    )

    def states(checkpoint: MemoryCheckpoint, **changes: Any) -> np.ndarray:
        draft = load(checkpoint.copy(**changes), target)
        caches = draft.new_caches()
        draft.commit(one_row([0] * 14, 0, caches), mx.array(taps[:14]))
        return np.array(draft.forward(one_row([5, 127, 127], 14, caches)))

    plain = states(checkpoint)
    assert np.abs(states(checkpoint, rope_interleaved=True) - plain).max() > 1e-3
    with pytest.raises(CheckpointError, match=r"q_proj\.bias"):
        states(checkpoint, attention_bias=True)
    fused = MemoryCheckpoint(checkpoint.config, checkpoint.tensors)
    for layer in range(2):
        prefix = f"layers.{layer}.self_attn"
        parts = {}
        for seed, (part, rows) in enumerate({"q": 64, "k": 32, "v": 32, "o": 64}.items()):
            bias = mx.random.normal((rows,), key=mx.random.key(seed))
            checkpoint.tensors[f"{prefix}.{part}_proj.bias"] = parts[part] = bias
        fused.tensors[f"{prefix}.o_proj.bias"] = parts["o"]
        fused.tensors[f"{prefix}.qkv_proj.bias"] = mx.concatenate([parts[part] for part in "qkv"])
        matrices = [fused.tensors.pop(f"{prefix}.{part}_proj.weight") for part in "qkv"]
        fused.tensors[f"{prefix}.qkv_proj.weight"] = mx.concatenate([m for m in matrices if isinstance(m, mx.array)])
    found = states(checkpoint, attention_bias=True)
    assert np.abs(found - plain).max() > 0.1
    np.testing.assert_array_equal(found, states(fused, attention_bias=True))


@pytest.mark.parametrize("name", ["dflash_full", "dflash_laguna", "dflash2"])
def test_a_packed_draft_gives_what_its_dense_matrices_give(name: str) -> None:
    how = Quantization("affine", 4, 32)
    packed, target, golden = draft_checkpoint(name).quantized(how), target_of(name), golden_of(name)
    found = []
    for checkpoint in (packed, packed.dequantized()):
        draft = load(checkpoint, target)
        caches = draft.new_caches()
        draft.commit(one_row([0] * 14, 0, caches), mx.array(golden["taps"][:14]))
        found.append(np.array(draft.forward(one_row([5, 127, 127, 127], 14, caches))))
    np.testing.assert_allclose(found[0], found[1], rtol=0, atol=1e-3)
