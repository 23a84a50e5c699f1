"""Checkpoints opened from GGUF files."""

import struct

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arriero.errors import CheckpointError
from arriero.model.checkpoint import Checkpoint
from arriero.model.weight import Quantization
from arriero.source import GGUFSource
from tests.helpers.gguf_files import encode, gguf_bytes, random_blocks, write_tiny_llama_gguf
from tests.helpers.memory_checkpoint import dequantize

ROWS = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)


def open_file(path) -> Checkpoint:
    return Checkpoint.open(GGUFSource((str(path),)))


def open_bytes(tmp_path, keys, tensors) -> Checkpoint:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(keys, tensors))
    return open_file(path)


def keys_of(architecture: str, **more):
    named = {
        "block_count": 2,
        "context_length": 4096,
        "embedding_length": 64,
        "feed_forward_length": 128,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-6,
        **more,
    }
    return {"general.architecture": architecture} | {f"{architecture}.{key}": item for key, item in named.items()}


EMBEDDING = {"token_embd.weight": encode("F32", ROWS), "output_norm.weight": encode("F32", ROWS[:1])}


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"])
def test_every_tensor_has_its_hugging_face_name_row_order_and_values(tmp_path, kind):
    meaning = write_tiny_llama_gguf(tmp_path / "m.gguf", kind, tied=False)
    checkpoint = open_file(tmp_path / "m.gguf")
    assert set(checkpoint.names()) == set(meaning)
    for name, values in meaning.items():
        assert checkpoint.info(name).shape == values.shape
        weight = checkpoint.weight(name)
        assert weight.shape == values.shape
        assert weight.quantization == checkpoint.info(name).quantization
        np.testing.assert_array_equal(np.array(dequantize(weight).astype(mx.float32)), values)
    assert checkpoint.unused() == []
    assert checkpoint.dialect == "gguf"


def test_a_llama_configuration_is_made_from_the_metadata(tmp_path):
    write_tiny_llama_gguf(tmp_path / "m.gguf")
    checkpoint = open_file(tmp_path / "m.gguf")
    assert checkpoint.config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "vocab_size": 268,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert checkpoint.generation_config == {"eos_token_id": [2], "bos_token_id": 1}


def test_an_output_matrix_unties_the_head_and_16_bit_files_keep_float16(tmp_path):
    write_tiny_llama_gguf(tmp_path / "m.gguf", "F16", tied=False)
    config = open_file(tmp_path / "m.gguf").config
    assert config["tie_word_embeddings"] is False
    assert config["torch_dtype"] == "float16"


def test_every_end_token_is_listed(tmp_path):
    write_tiny_llama_gguf(tmp_path / "m.gguf", metadata={"tokenizer.ggml.eot_token_id": 0})
    assert open_file(tmp_path / "m.gguf").generation_config["eos_token_id"] == [2, 0]


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({}, None),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}, {"rope_type": "linear", "factor": 8.0}),
        ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32768},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        ),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 0.0}, None),
        ({"rope.scaling.type": "longrope", "rope.scaling.factor": 4.0}, {"rope_type": "longrope", "factor": 4.0}),
        ({"rope.scaling.type": "longrope"}, {"rope_type": "longrope", "factor": 1.0}),
    ],
)
def test_rope_scaling_is_told_as_hugging_face_does(tmp_path, keys, scaling):
    assert open_bytes(tmp_path, keys_of("qwen3", **keys), EMBEDDING).config.get("rope_scaling") == scaling


def test_a_yarn_gain_of_the_file_multiplies_yarns_own(tmp_path):
    keys = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 0.5}
    scaling = open_bytes(tmp_path, keys_of("qwen3", **keys), EMBEDDING).config["rope_scaling"]
    assert scaling["attention_factor"] == pytest.approx(0.5 * (1 + 0.1 * np.log(4)))


def test_a_table_of_rope_factors_becomes_configuration_and_is_no_tensor(tmp_path):
    factors = np.array([[1.0, 1.5, 8.0, 8.0]], np.float32)
    checkpoint = open_bytes(tmp_path, keys_of("llama"), EMBEDDING | {"rope_freqs.weight": encode("F32", factors)})
    assert checkpoint.config["rope_scaling"] == {"rope_type": "llama3_factors", "factors": [1.0, 1.5, 8.0, 8.0]}
    assert "rope_freqs.weight" not in checkpoint


def test_gemma_3_has_its_windows_its_two_rope_bases_and_its_softmax_scale(tmp_path):
    keys = keys_of(
        "gemma3",
        **{"attention.key_length": 32, "attention.sliding_window": 512, "rope.freq_base": 1e6, "block_count": 2},
    )
    config = open_bytes(tmp_path, keys, EMBEDDING).config
    assert config["architectures"] == ["Gemma3ForCausalLM"]
    assert config["layer_types"] == ["sliding_attention", "sliding_attention"]
    assert (config["sliding_window"], config["sliding_window_pattern"]) == (512, 6)
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (1e6, 10000.0)
    assert (config["head_dim"], config["query_pre_attn_scalar"]) == (32, 32)


def test_gemma_3_rope_bases_are_read_in_their_other_spelling_and_have_defaults(tmp_path):
    keys = {"rope.global.freq_base": 5e5, "rope.local.freq_base": 2e4}
    config = open_bytes(tmp_path, keys_of("gemma3", **keys), EMBEDDING).config
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (5e5, 2e4)
    config = open_bytes(tmp_path, keys_of("gemma3"), EMBEDDING).config
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (1e6, 1e4)


@pytest.mark.parametrize(("architecture", "dtype"), [("qwen3", "float16"), ("gemma3", "bfloat16")])
def test_files_of_mostly_float16_run_in_it_unless_the_family_overflows(tmp_path, architecture, dtype):
    tensors = EMBEDDING | {"blk.0.attn_v.weight": encode("F16", np.tile(ROWS, (3, 1)))}
    assert open_bytes(tmp_path, keys_of(architecture), tensors).config["torch_dtype"] == dtype


def test_gemma_2_has_its_caps_and_alternates(tmp_path):
    config = open_bytes(tmp_path, keys_of("gemma2", final_logit_softcapping=20.0), EMBEDDING).config
    assert config["layer_types"] == ["sliding_attention", "full_attention"]
    assert (config["attn_logit_softcapping"], config["final_logit_softcapping"]) == (50.0, 20.0)


def test_gemma_norms_keep_their_four_places(tmp_path):
    tensors = EMBEDDING | {
        f"blk.0.{name}.weight": encode("F32", ROWS[:1])
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "attn_q_norm", "attn_k_norm")
    }
    names = open_bytes(tmp_path, keys_of("gemma3"), tensors).names()
    assert [name.removeprefix("model.layers.0.") for name in names[2:]] == [
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "pre_feedforward_layernorm.weight",
        "post_feedforward_layernorm.weight",
        "self_attn.q_norm.weight",
        "self_attn.k_norm.weight",
    ]


@pytest.mark.parametrize("kind", ["Q4_0", "NVFP4"])
def test_stacked_experts_stay_stacked(tmp_path, kind):
    keys = keys_of("qwen3moe", expert_count=4, expert_used_count=2, expert_feed_forward_length=32)
    stack = random_blocks(kind, 4 * 32, 64).reshape(4, 32, -1)
    tensors = EMBEDDING | {
        "blk.1.ffn_up_exps.weight": (kind, stack),
        "blk.1.ffn_gate_inp.weight": encode("F32", ROWS[:4]),
    }
    checkpoint = open_bytes(tmp_path, keys, tensors)
    assert checkpoint.config["num_experts"] == 4
    assert checkpoint.config["num_experts_per_tok"] == 2
    assert checkpoint.config["moe_intermediate_size"] == 32
    assert "model.layers.1.mlp.gate.weight" in checkpoint
    weight = checkpoint.weight("model.layers.1.mlp.experts.up_proj.weight")
    assert weight.shape == (4, 32, 64)
    assert weight.scales.shape == (4, 32, 64 // weight.quantization.group_size)


def test_nvfp4_multipliers_are_the_weights_global_scale(tmp_path):
    keys = keys_of("qwen3moe", expert_count=4, expert_used_count=2, expert_feed_forward_length=32)
    per_expert = np.array([[1.0, 2.0, 3.0, 4.0]], np.float32)
    tensors = EMBEDDING | {
        "blk.0.ffn_up_exps.weight": ("NVFP4", random_blocks("NVFP4", 4 * 32, 64).reshape(4, 32, -1)),
        "blk.0.ffn_up_exps.scale": encode("F32", per_expert),
        "blk.0.attn_v.weight": ("NVFP4", random_blocks("NVFP4", 32, 64)),
        "blk.0.attn_v.scale": encode("F32", per_expert[:, 2:3]),
        "blk.0.attn_v.input_scale": encode("F32", per_expert[:, :1]),
    }
    checkpoint = open_bytes(tmp_path, keys, tensors)
    assert checkpoint.weight("model.layers.0.mlp.experts.up_proj.weight").global_scale.tolist() == [1, 2, 3, 4]
    value = checkpoint.weight("model.layers.0.self_attn.v_proj.weight")
    assert value.quantization == Quantization("nvfp4", 4, 16)
    assert value.global_scale.item() == 3
    assert not [name for name in checkpoint.names() if name.endswith("scale")]


def test_a_scale_beside_another_type_is_refused(tmp_path):
    tensors = EMBEDDING | {
        "blk.0.attn_v.weight": encode("Q8_0", ROWS),
        "blk.0.attn_v.scale": encode("F32", ROWS[:1, :1]),
    }
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_v\.scale is a scale"):
        open_bytes(tmp_path, keys_of("qwen3"), tensors)


def test_biases_of_q_and_k_follow_their_rows(tmp_path):
    bias = np.arange(64, dtype=np.float32)[None]
    swapped = bias.reshape(4, 2, 8).swapaxes(1, 2).reshape(64)
    checkpoint = open_bytes(
        tmp_path, keys_of("llama"), EMBEDDING | {"blk.0.attn_q.bias": ("F32", swapped.view(np.uint8))}
    )
    np.testing.assert_array_equal(np.array(checkpoint.tensor("model.layers.0.self_attn.q_proj.bias")), bias[0])
    np.testing.assert_array_equal(
        open_file(tmp_path / "model.gguf").host("model.layers.0.self_attn.q_proj.bias"), bias[0]
    )


def test_qwen_rows_stay_where_they_are(tmp_path):
    checkpoint = open_bytes(tmp_path, keys_of("qwen2"), EMBEDDING | {"blk.0.attn_q.weight": encode("F32", ROWS)})
    np.testing.assert_array_equal(np.array(checkpoint.tensor("model.layers.0.self_attn.q_proj.weight")), ROWS)


def test_an_unknown_architecture_is_left_to_the_registry_by_name(tmp_path):
    checkpoint = open_bytes(tmp_path, {"general.architecture": "mamba9"}, EMBEDDING)
    assert checkpoint.config["architectures"] == ["mamba9"]


def test_unknown_tensors_are_listed_and_stay_unused(tmp_path):
    checkpoint = open_bytes(tmp_path, keys_of("qwen3"), EMBEDDING | {"blk.0.strange.weight": encode("F32", ROWS)})
    assert "blk.0.strange.weight" in checkpoint.unused()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": None}, "general.architecture is missing"),
        ({"llama.block_count": None}, r"llama\.block_count is missing"),
        ({"llama.block_count": 1 << 31}, "2147483648 layers of width 64 do not fit"),
        ({"llama.embedding_length": 32}, "2 layers of width 32 do not fit"),
        ({"llama.attention.head_count": "four"}, r"llama\.attention\.head_count has the unusable value 'four'"),
        ({"llama.attention.head_count": [4, 8]}, "differs between layers"),
        ({"llama.attention.head_count": 1000}, "1000 heads do not fit"),
        ({"llama.rope.freq_base": float("nan")}, r"llama\.rope\.freq_base has the unusable value nan"),
        ({"llama.attention.layer_norm_rms_epsilon": -1.0}, "unusable value -1.0"),
        ({"llama.context_length": -5}, "unusable value -5"),
        ({"llama.rope.dimension_count": 8, "llama.attention.key_length": 16}, "a part of the head"),
        ({"llama.attention.scale": 0.5}, r"llama\.attention\.scale is 0\.5, which is not supported"),
        ({"llama.attention.causal": False}, r"llama\.attention\.causal is False"),
        ({"tokenizer.ggml.tokens": ["a"] * 1000}, "the vocabulary has 1000 tokens and token_embd.weight"),
    ],
)
def test_metadata_that_make_no_sense_are_refused_by_key(tmp_path, change, message):
    keys = {key: item for key, item in (keys_of("llama") | change).items() if item is not None}
    with pytest.raises(CheckpointError, match=message):
        open_bytes(tmp_path, keys, EMBEDDING)


def test_a_model_without_embedding_and_rows_that_are_no_heads_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"token_embd\.weight is missing"):
        open_bytes(tmp_path, keys_of("llama"), {})
    with pytest.raises(CheckpointError, match=r"attn_q\.weight has 63 rows for 4 heads"):
        open_bytes(tmp_path, keys_of("llama"), EMBEDDING | {"blk.0.attn_q.weight": encode("F32", ROWS[:63])})


def test_a_huge_table_of_rope_factors_is_refused_unread(tmp_path):
    factors = {"rope_freqs.weight": encode("F32", np.ones(5000, np.float32))}
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight holds 5000 factors"):
        open_bytes(tmp_path, keys_of("llama"), EMBEDDING | factors)


def test_a_type_without_weights_is_refused_when_opened(tmp_path):
    tensors = EMBEDDING | {"blk.0.attn_v.weight": ("Q8_K", np.zeros((2, 292), np.uint8))}
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_v\.weight is stored as Q8_K"):
        open_bytes(tmp_path, keys_of("qwen3"), tensors)


def test_a_damaged_block_is_named_when_loaded(tmp_path):
    raw = random_blocks("Q4_0", 64, 64)
    raw[3, :2] = np.array([np.inf], "<f2").view(np.uint8)
    checkpoint = open_bytes(tmp_path, keys_of("qwen3"), EMBEDDING | {"blk.0.attn_v.weight": ("Q4_0", raw)})
    with pytest.raises(CheckpointError, match=r"model\.gguf: tensor blk\.0\.attn_v\.weight: .*not a finite number"):
        checkpoint.weight("model.layers.0.self_attn.v_proj.weight")


def test_a_missing_tensor_is_named_with_what_to_do(tmp_path):
    checkpoint = open_bytes(tmp_path, keys_of("qwen3"), EMBEDDING)
    with pytest.raises(CheckpointError, match=r"model\.gguf: tensor model\.norm\.bias is missing; pull .* or create"):
        checkpoint.tensor("model.norm.bias")


def test_a_packed_tensor_is_not_given_as_numbers(tmp_path):
    checkpoint = open_bytes(tmp_path, keys_of("qwen3"), EMBEDDING | {"output.weight": encode("Q8_0", ROWS)})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is packed as int8"):
        checkpoint.tensor("lm_head.weight")


def test_shards_are_one_model(tmp_path):
    first, second = tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf"
    first.write_bytes(gguf_bytes(keys_of("qwen3") | {"split.no": 0, "split.count": 2}, EMBEDDING))
    second.write_bytes(gguf_bytes({"split.no": 1, "split.count": 2}, {"output.weight": encode("F16", ROWS)}))
    checkpoint = Checkpoint.open(GGUFSource((str(first), str(second))))
    assert checkpoint.tensor("lm_head.weight").dtype == mx.float16
    assert checkpoint.config["tie_word_embeddings"] is False


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_no_damaged_model_gives_anything_but_a_checkpoint_error(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp()
    seed = folder / "seed.gguf"
    if not seed.exists():
        write_tiny_llama_gguf(
            seed, "Q8_0", layers=1, hidden=32, intermediate=32, metadata={"llama.rope.scaling.factor": 2.0}
        )
    raw = bytearray(seed.read_bytes())
    keys = raw.index(b"tokenizer.ggml.model")
    entries = raw.index(b"token_embd.weight")
    for _ in range(data.draw(st.integers(1, 3))):
        start, end = data.draw(st.sampled_from([(0, keys), (entries - 20, entries + 900)]))
        at = data.draw(st.integers(start, end))
        if data.draw(st.booleans()):
            raw[at] = data.draw(st.integers(0, 255))
        else:
            raw[at : at + 4] = struct.pack("<I", data.draw(st.sampled_from([0, 1, 2, 3, 6, 8, 1 << 31, (1 << 32) - 1])))
    path = folder / "damaged.gguf"
    path.write_bytes(raw)
    try:
        checkpoint = open_file(path)
        for name in checkpoint.names():
            checkpoint.weight(name)
    except CheckpointError:
        pass
