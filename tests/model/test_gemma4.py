"""What only Gemma 4 does: shared keys and values, layers' own inputs, experts beside the MLP, suppressed tokens."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from arriero.errors import CheckpointError, UnsupportedFeature
from arriero.model.architectures import load_model
from arriero.model.architectures.gemma4 import Config, Model
from arriero.model.architectures.gemma4_inputs import KEY
from arriero.model.checkpoint import Checkpoint
from arriero.model.layers.attention import attend_to
from arriero.model.weight import Quantization
from arriero.source import LayersSource
from tests.helpers.forward import Rows, chunked, packed, whole
from tests.helpers.memory_checkpoint import MemoryCheckpoint, quantize

GOLDENS = Path(__file__).parent / "goldens"
NAMES = ["gemma4_e2b", "gemma4_31b", "gemma4_26b_a4b"]
SLIDING, FULL = "sliding_attention", "full_attention"


def golden(name: str) -> MemoryCheckpoint:
    return MemoryCheckpoint.golden(GOLDENS / name)


def ids(name: str) -> list[int]:
    with np.load(GOLDENS / name / "golden.npz") as file:
        found: list[int] = file["ids"].tolist()
    return found


def model_of(checkpoint: MemoryCheckpoint, dtype: mx.Dtype = mx.float32) -> Model:
    model = load_model(checkpoint.typed(), dtype)
    assert isinstance(model, Model)
    return model


def published(name: str, unified: bool = False) -> MemoryCheckpoint:
    """A golden as it would be published: a text part in a wrapper, full layers by fields of their own."""
    text = golden(name)
    full = text.config["per_layer_config"][str(text.config["layer_types"].index(FULL))]
    inner = text.copy(per_layer_config=None, global_head_dim=full["head_dim"], architectures=None).config
    if "num_key_value_heads" in full:
        inner["num_global_key_value_heads"] = full["num_key_value_heads"]
    config = {"model_type": "gemma4_unified" if unified else "gemma4", "text_config": inner, "vision_config": {"a": 1}}
    tensors = {key.replace("model.", "model.language_model.", 1): value for key, value in text.tensors.items()}
    return MemoryCheckpoint(config, tensors)


@pytest.mark.parametrize("name", NAMES)
def test_the_published_form_gives_the_same_bits(name: str, caplog: pytest.LogCaptureFixture) -> None:
    expected = whole(model_of(golden(name)), ids(name))
    np.testing.assert_array_equal(whole(model_of(published(name)), ids(name)), expected)
    assert not caplog.records


def test_the_unified_form_is_the_same_network_with_longer_defaults() -> None:
    checkpoint = published("gemma4_31b", unified=True)
    expected = whole(model_of(golden("gemma4_31b")), ids("gemma4_31b"))
    np.testing.assert_array_equal(whole(model_of(checkpoint), ids("gemma4_31b")), expected)
    for field in ("max_position_embeddings", "sliding_window", "hidden_size_per_layer_input"):
        del checkpoint.config["text_config"][field]
    config = Config.read(checkpoint.config)
    assert config.shape.architecture == "Gemma4UnifiedForConditionalGeneration"
    assert (config.shape.context_length, config.attention[0].window, config.inputs) == (262144, 1024, None)


def test_towers_that_nothing_declares_are_left_out_with_a_word_and_images_are_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    checkpoint = published("gemma4_e2b")
    for tower in ("vision_tower.encoder.layers.0.mlp.up_proj.linear", "audio_tower.layers.0.norm", "embed_vision.x"):
        checkpoint.tensors[f"model.{tower}.weight"] = mx.zeros((2, 2))
    with caplog.at_level(logging.INFO):
        model = model_of(checkpoint)
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
    assert "the tower for images is not loaded (2 tensors)" in caplog.text
    assert "the tower for sound is not loaded (1 tensors)" in caplog.text
    with pytest.raises(UnsupportedFeature, match="does not take images"):
        model.forward(Rows(model).batch([[3]], features=[mx.zeros((1, 64))]))


def test_reading_layers_own_no_cache_and_count_no_bytes() -> None:
    model = model_of(golden("gemma4_e2b"), mx.bfloat16)
    caches = model.new_caches()
    assert [cache is None for cache in caches] == [False, False, False, True, True, True]
    assert Config.read(golden("gemma4_e2b").config).sources == [0, 1, 2, 2, 2, 1]
    assert model.facts.cache_bytes_per_token == 2 * 32 * 2
    assert model.facts.cache_bytes_fixed == 2 * (2 * 16 * 2) * (8 + 512)


def test_keys_and_values_that_reading_layers_do_not_use_are_left_aside_without_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    checkpoint = golden("gemma4_e2b")
    for name in ("k_proj", "v_proj", "k_norm"):
        checkpoint.tensors[f"model.layers.4.self_attn.{name}.weight"] = mx.full((16, 64), mx.nan)
    np.testing.assert_array_equal(
        whole(model_of(checkpoint), ids("gemma4_e2b")), whole(model_of(golden("gemma4_e2b")), ids("gemma4_e2b"))
    )
    assert not caplog.records


def test_a_layer_that_reads_before_its_owner_has_written_is_an_error() -> None:
    rows = Rows(model_of(golden("gemma4_e2b")))
    batch = rows.batch([[3, 4]])
    with pytest.raises(ValueError, match="slot 2 holds 0 positions, but its readers need 2"):
        attend_to(mx.zeros((2, 2, 16)), batch, 2, scale=1.0, window=8)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", NAMES)
class TestLongRows:
    """Rows longer than a step of the caches, whose windows have moved on."""

    def test_chunks_and_company_keep_their_bits(self, name: str) -> None:
        model, prompt = model_of(golden(name)), (ids(name) * 15)[:600]
        expected = whole(model, prompt)
        np.testing.assert_array_equal(chunked(model, prompt, (250, 1, 4, 1, 200, 7)), expected)
        np.testing.assert_array_equal(packed(model, [prompt[:31], prompt, prompt[5:300]])[1], expected)

    @pytest.mark.parametrize("back", [1, 5, 40, 299])
    def test_a_row_that_went_back_continues_like_a_fresh_one(self, name: str, back: int) -> None:
        model, prompt = model_of(golden(name)), (ids(name) * 15)[:600]
        rows, other, offset = Rows(model), [7, 8, 9] * 5, 300 - back
        for cache in rows.caches[0]:
            if cache is not None:
                cache.plan([offset])
        rows.logits([prompt[:300]])
        snapshots = [None if cache is None else cache.take()[0] for cache in rows.caches[0]]
        for token in prompt[300:320]:
            rows.logits([[token]])
        for cache, snapshot in zip(rows.caches[0], snapshots, strict=True):
            assert cache is None or cache.rewind(offset, snapshot)
        rows.positions = [offset]
        expected = whole(model, prompt[:offset] + other)[offset:]
        np.testing.assert_array_equal(np.concatenate([rows.logits([other[:1]]), rows.logits([other[1:]])]), expected)

    def test_a_row_restored_from_snapshots_continues_like_the_first(self, name: str) -> None:
        model, prompt = model_of(golden(name)), (ids(name) * 15)[:600]
        first, second = Rows(model), Rows(model)
        first.logits([prompt[:300]])
        for cache, fresh in zip(first.caches[0], second.caches[0], strict=True):
            if cache is not None and fresh is not None:
                snapshot = cache.snapshot()
                assert snapshot is not None
                assert fresh.restore(snapshot)
        second.positions = [300]
        np.testing.assert_array_equal(second.logits([prompt[300:]]), whole(model, prompt)[300:])


@pytest.mark.parametrize("name", NAMES)
def test_a_tap_is_the_end_of_its_layer(name: str) -> None:
    model, prompt = model_of(golden(name)), ids(name)
    last = model.facts.layers - 1
    hidden = model.forward(Rows(model).batch([prompt], taps=[last, 0]))
    assert hidden.taps is not None
    np.testing.assert_array_equal(np.array(model.norm(hidden.taps[:, :64])), np.array(hidden.final))
    first = hidden.taps[:, 64:]
    checkpoint = golden(name)
    scalar = checkpoint.tensors["model.layers.0.layer_scalar"]
    assert isinstance(scalar, mx.array)
    checkpoint.tensors["model.layers.0.layer_scalar"] = scalar * 2
    doubled = load_model(checkpoint.typed(), mx.float32).forward(Rows(model).batch([prompt], taps=[0])).taps
    np.testing.assert_array_equal(np.array(doubled), 2 * np.array(first))


def test_a_missing_layer_scalar_is_one() -> None:
    with_one, without = golden("gemma4_31b"), golden("gemma4_31b")
    with_one.tensors["model.layers.1.layer_scalar"] = mx.ones(1)
    del without.tensors["model.layers.1.layer_scalar"]
    prompt = ids("gemma4_31b")
    np.testing.assert_array_equal(whole(model_of(with_one), prompt), whole(model_of(without), prompt))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_suppressed_tokens_have_no_chance_except_in_raw_logits(dtype: mx.Dtype) -> None:
    checkpoint, plain = golden("gemma4_31b"), model_of(golden("gemma4_31b"), dtype)
    checkpoint.generation_config = {"suppress_tokens": [5, 127]}
    model = model_of(checkpoint, dtype)
    hidden = mx.random.normal((3, 64), key=mx.random.key(0)).astype(dtype) * 9
    logits, free, raw = model.logits(hidden), plain.logits(hidden), model.raw_logits(hidden)
    assert logits.dtype == dtype
    kept = [token for token in range(128) if token not in (5, 127)]
    assert mx.array_equal(logits[:, mx.array(kept)], free[:, mx.array(kept)]).item()
    assert mx.all(logits[:, mx.array([5, 127])] == -mx.inf).item()
    assert mx.abs(raw).max().item() > 30
    assert mx.abs(free).max().item() <= 30
    assert mx.array_equal(raw, plain.raw_logits(hidden)).item()


@pytest.mark.parametrize("value", [[128], [-1], ["a"], [True], 7])
def test_suppressed_tokens_that_are_no_tokens_are_refused(value: Any) -> None:
    checkpoint = golden("gemma4_31b")
    checkpoint.generation_config = {"suppress_tokens": value}
    with pytest.raises(
        CheckpointError, match=r"generation_config.json: `suppress_tokens` should be a list of token ids"
    ):
        load_model(checkpoint.typed(), mx.float32)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    "how", [Quantization("affine", 4, 32), Quantization("nvfp4", 4, 16), Quantization("mxfp8", 8, 32)], ids=str
)
class TestPacked:
    """A packed model is the dense model of its decoded weights, per-layer table and experts included."""

    def test_small_models(self, how: Quantization) -> None:
        checkpoint = golden("gemma4_e2b").quantized(how, ".weight")
        assert not isinstance(checkpoint.tensors["model.embed_tokens_per_layer.weight"], mx.array)
        self.check(checkpoint, ids("gemma4_e2b"))

    def test_experts_as_mlx_conversions_name_them(self, how: Quantization) -> None:
        checkpoint = golden("gemma4_26b_a4b").quantized(how, ".weight")
        for layer in range(2):
            experts = f"model.layers.{layer}.experts"
            both, down = (checkpoint.tensors.pop(f"{experts}.{name}") for name in ("gate_up_proj", "down_proj"))
            assert isinstance(both, mx.array)
            gate, up = mx.split(both, 2, axis=1)
            for name, bank in {"gate_proj": gate, "up_proj": up, "down_proj": down}.items():
                checkpoint.tensors[f"{experts}.switch_glu.{name}.weight"] = quantize(bank, how)
        self.check(checkpoint, ids("gemma4_26b_a4b"))

    def check(self, checkpoint: MemoryCheckpoint, prompt: list[int]) -> None:
        model, dense = model_of(checkpoint), model_of(checkpoint.dequantized())
        expected = whole(model, prompt)
        np.testing.assert_allclose(expected, whole(dense, prompt), atol=1e-3)
        np.testing.assert_array_equal(chunked(model, prompt, (1, 7, 3)), expected)


def test_a_stored_model_of_one_layer_a_tensor_gives_the_same_bits(tmp_path: Path) -> None:
    # Layers' names end in `.scale` where a router is: they are tensors and no companions.
    name = "gemma4_26b_a4b"
    layers = {}
    for number, (key, value) in enumerate(golden(name).tensors.items()):
        assert isinstance(value, mx.array)
        layers[key] = str(tmp_path / f"{number}.safetensors")
        mx.save_safetensors(layers[key], {key: value})
    generation = tmp_path / "generation_config.json"
    generation.write_text('{"suppress_tokens": [5]}')
    files = {"config.json": str(GOLDENS / name / "config.json"), "generation_config.json": str(generation)}
    logits = whole(load_model(Checkpoint.open(LayersSource(layers, files)), mx.float32), ids(name))
    expected = whole(model_of(golden(name)), ids(name))
    expected[:, 5] = -np.inf
    np.testing.assert_array_equal(logits, expected)


def test_an_expert_factor_scales_what_its_expert_gives() -> None:
    prompt, checkpoint = ids("gemma4_26b_a4b"), golden("gemma4_26b_a4b")
    checkpoint.tensors["model.layers.0.router.per_expert_scale"] = mx.zeros(6)
    down = checkpoint.tensors["model.layers.0.experts.down_proj"]
    assert isinstance(down, mx.array)
    silent = golden("gemma4_26b_a4b")
    silent.tensors["model.layers.0.experts.down_proj"] = mx.zeros_like(down)
    np.testing.assert_array_equal(whole(model_of(checkpoint), prompt), whole(model_of(silent), prompt))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma4_31b", {"use_bidirectional_attention": "all"}, "`use_bidirectional_attention` should be null or"),
        ("gemma4_31b", {"layer_types": [FULL, SLIDING, SLIDING]}, "a list that ends in full_attention"),
        ("gemma4_31b", {"layer_types": ["linear_attention"] * 3}, "`layer_types` should be a list of 3 out of"),
        ("gemma4_31b", {"num_kv_shared_layers": 1}, "leaves a layer of type full_attention before"),
        ("gemma4_31b", {"num_kv_shared_layers": 3}, "`num_kv_shared_layers` should be a number that leaves"),
        ("gemma4_31b", {"num_kv_shared_layers": 4}, "`num_kv_shared_layers` should be a number that leaves"),
        ("gemma4_31b", {"per_layer_config": {"2": {"window": 3}}}, "head_dim and num_key_value_heads of some layers"),
        ("gemma4_31b", {"per_layer_config": {"2": {"num_key_value_heads": 3}}}, "a divisor of num_attention_heads"),
        (
            "gemma4_31b",
            {"per_layer_config": {"2": {"head_dim": 64}}},
            r"layers\.2\.self_attn\.q_proj\.weight has shape",
        ),
        ("gemma4_31b", {"attention_k_eq_v": False}, r"model\.layers\.2\.self_attn\.v_proj\.weight is missing"),
        ("gemma4_31b", {"rope_parameters": {"rope_type": "default"}}, "an object for each type of layer"),
        (
            "gemma4_31b",
            {"rope_parameters": {FULL: {"rope_type": "default", "partial_rotary_factor": 0.25}, SLIDING: {}}},
            r"`rope_parameters\.full_attention` should be proportional",
        ),
        ("gemma4_31b", {"hidden_size_per_layer_input": 8}, r"embed_tokens_per_layer\.weight is missing"),
        ("gemma4_31b", {"hidden_activation": "relu"}, "`hidden_activation` should be one of"),
        ("gemma4_31b", {"attn_logit_softcapping": 50.0}, "`attn_logit_softcapping` is 50.0, which .* does not honour"),
        ("gemma4_e2b", {"vocab_size_per_layer_input": 64}, r"`vocab_size_per_layer_input` should be at least"),
        ("gemma4_e2b", {"use_double_wide_mlp": False}, r"layers\.3\.mlp\.gate_proj\.weight has shape \[48, 64\]"),
        ("gemma4_e2b", {"attention_bias": True}, r"self_attn\.q_proj\.bias"),
        ("gemma4_26b_a4b", {"top_k_experts": 7}, r"at most the number of experts \(6\)"),
        ("gemma4_26b_a4b", {"moe_intermediate_size": None}, "`moe_intermediate_size` is missing"),
    ],
)
def test_what_cannot_run_is_refused_by_name(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_model(golden(name).copy(**changes).typed(), mx.float32)


def test_the_configurations_of_published_sizes_are_read() -> None:
    ropes = {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    }
    common = {
        "attention_bias": False,
        "enable_moe_block": False,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "moe_intermediate_size": None,
        "num_experts": None,
        "rope_parameters": ropes,
        "top_k_experts": None,
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
    }
    largest_unified = {
        "attention_k_eq_v": True,
        "hidden_size": 3840,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": 15360,
        "layer_types": ([SLIDING] * 5 + [FULL]) * 8,
        "max_position_embeddings": 262144,
        "num_attention_heads": 16,
        "num_global_key_value_heads": 1,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "num_kv_shared_layers": 0,
        "sliding_window": 1024,
        "use_bidirectional_attention": "vision",
    }
    text = {**common, **largest_unified}
    config = Config.read({"architectures": ["Gemma4UnifiedForConditionalGeneration"], "text_config": text})
    shapes = [(a.kv_heads, a.head_dim, a.window) for a in config.attention[4:6]]
    assert shapes == [(8, 256, 1024), (1, 512, None)]
    assert config.keys_are_values
    smallest = {
        "attention_k_eq_v": False,
        "hidden_size": 1536,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": 6144,
        "layer_types": ([SLIDING] * 4 + [FULL]) * 7,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_global_key_value_heads": None,
        "num_hidden_layers": 35,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 20,
        "sliding_window": 512,
        "use_bidirectional_attention": None,
        "use_double_wide_mlp": True,
    }
    config = Config.read({"model_type": "gemma4", "text_config": {**common, **smallest}})
    assert config.readers == list(range(15, 35))
    assert {config.sources[index] for index in config.readers} == {13, 14}
    assert [(a.kv_heads, a.head_dim, a.window) for a in config.attention[33:]] == [(1, 256, 512), (1, 512, None)]
    assert np.count_nonzero(config.ropes["full_attention"].frequencies(512)[0]) == 64


def test_layers_that_are_not_listed_alternate_five_to_one_and_end_full() -> None:
    config = golden("gemma4_31b").copy(layer_types=None, per_layer_config=None, num_hidden_layers=8).config
    assert Config.read(config).kinds == [SLIDING] * 5 + [FULL, SLIDING, FULL]
    assert Config.read(config | {"sliding_window_pattern": 3}).kinds == ([SLIDING] * 2 + [FULL]) * 2 + [SLIDING, FULL]


def test_inputs_of_layers_are_normed_behind_their_division_by_the_root_of_the_width() -> None:
    eps = 0.5
    checkpoint = golden("gemma4_e2b").copy(rms_norm_eps=eps)
    model, tensors = model_of(checkpoint), checkpoint.tensors
    batch = Rows(model).batch([[3, 5, 8]])
    x = model.inputs(batch)
    weight, gain, table = (
        np.array(tensors[f"model.{name}.weight"].astype(mx.float32))  # type: ignore[union-attr]
        for name in ("per_layer_model_projection", "per_layer_projection_norm", "embed_tokens_per_layer")
    )
    split = (3, model.facts.layers, -1)
    projected = (np.array(x) @ weight.T * model.facts.hidden_size**-0.5).reshape(split)
    normed = projected / np.sqrt((projected**2).mean(-1, keepdims=True) + eps) * gain
    of_token = table[[3, 5, 8]].reshape(split) * projected.shape[-1] ** 0.5
    np.testing.assert_allclose(np.array(batch.memo[KEY]), (normed + of_token) * 0.5**0.5, atol=1e-5)
