"""Whole models: quantised, renamed, with taps, and what they say about leftovers."""

from __future__ import annotations

import logging
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from arriero.errors import CheckpointError, UnsupportedFeature
from arriero.model.architectures import load_model
from arriero.model.contract import Batch, Model
from arriero.model.weight import Quantization, Weight
from tests.helpers.forward import Rows, chunked, packed, whole
from tests.helpers.memory_checkpoint import MemoryCheckpoint

GOLDENS = Path(__file__).parent / "goldens"
FORMATS = [
    Quantization("affine", 4, 32),
    Quantization("affine", 8, 64),
    Quantization("nvfp4", 4, 16),
    Quantization("mxfp4", 4, 32),
    Quantization("mxfp8", 8, 32),
]


def golden(name: str) -> MemoryCheckpoint:
    return MemoryCheckpoint.golden(GOLDENS / name)


def ids(name: str) -> list[int]:
    with np.load(GOLDENS / name / "golden.npz") as file:
        found: list[int] = file["ids"].tolist()
    return found


def reference(name: str) -> np.ndarray:
    with np.load(GOLDENS / name / "golden.npz") as file:
        logits: np.ndarray = file["logits"]
    return logits


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("how", FORMATS, ids=lambda f: f"{f.name}-{f.group_size}")
@pytest.mark.parametrize("name", ["llama_linear_biases", "qwen3_moe", "qwen3_5_moe", "gemma3"])
class TestQuantized:
    """A packed model is the dense model of its decoded weights."""

    def test_logits_are_those_of_the_decoded_weights(self, name: str, how: Quantization) -> None:
        packed = golden(name).quantized(how, ".weight")
        model = load_model(packed.typed(), mx.float32)
        dense = load_model(packed.dequantized().typed(), mx.float32)
        np.testing.assert_allclose(whole(model, ids(name)), whole(dense, ids(name)), atol=5e-4)

    def test_chunks_and_shared_forwards_keep_their_bits(self, name: str, how: Quantization) -> None:
        model = load_model(golden(name).quantized(how, ".weight").typed(), mx.float32)
        prompt = ids(name)
        expected = whole(model, prompt)
        np.testing.assert_array_equal(chunked(model, prompt, (1, 7, 3)), expected)
        np.testing.assert_array_equal(packed(model, [prompt[:9], prompt, prompt[5:]])[1], expected)

    def test_sixteen_bit_activations_stay_so_with_scales_of_another_type(self, name: str, how: Quantization) -> None:
        checkpoint = golden(name).quantized(how, ".weight", mx.float16)
        model = load_model(checkpoint.typed(), mx.bfloat16)
        hidden = model.forward(Rows(model).batch([ids(name)])).final
        assert hidden.dtype == mx.bfloat16
        assert model.logits(hidden).dtype == mx.bfloat16


@pytest.mark.usefixtures("kernels")
def test_prompts_longer_than_the_sorting_threshold_keep_their_bits() -> None:
    model = load_model(golden("qwen3_moe").typed(), mx.float32)
    prompt = (ids("qwen3_moe") * 3)[:100]
    expected = whole(model, prompt)
    for size in (1, 63, 64, 70):
        np.testing.assert_array_equal(chunked(model, prompt, (size,)), expected)


@pytest.mark.usefixtures("kernels")
def test_prompts_longer_than_a_step_of_the_caches_keep_their_bits() -> None:
    for name in ("gemma3", "mistral_window", "qwen3_5"):
        model = load_model(golden(name).typed(), mx.float32)
        prompt = (ids(name) * 8)[:300]
        np.testing.assert_array_equal(chunked(model, prompt, (250, 1, 4, 1, 44)), whole(model, prompt))


def test_taps_are_the_outputs_of_the_layers_asked_for_in_their_order() -> None:
    model = load_model(golden("llama").typed(), mx.float32)
    prompt = ids("llama")
    both = model.forward(Rows(model).batch([prompt], taps=[2, 0]))
    first = model.forward(Rows(model).batch([prompt], taps=[0])).taps
    last = model.forward(Rows(model).batch([prompt], taps=[2])).taps
    assert both.taps is not None
    assert first is not None
    assert last is not None
    np.testing.assert_array_equal(np.array(both.taps), np.concatenate([np.array(last), np.array(first)], -1))
    np.testing.assert_array_equal(np.array(model.norm(last)), np.array(both.final))  # type: ignore[attr-defined]
    assert model.forward(Rows(model).batch([prompt])).taps is None


def test_images_are_refused() -> None:
    model = load_model(golden("llama").typed(), mx.float32)
    batch = Rows(model).batch([[3]], features=[mx.zeros((1, 64))])
    with pytest.raises(UnsupportedFeature, match="does not take images"):
        model.forward(batch)


def test_embeddings_for_drafts_have_no_scale_and_raw_logits_no_cap() -> None:
    model = load_model(golden("gemma2").typed(), mx.float32)
    table = golden("gemma2").tensors["model.embed_tokens.weight"]
    assert isinstance(table, mx.array)
    assert mx.array_equal(model.embed(mx.array([7, 3])), table[mx.array([7, 3])].astype(mx.float32)).item()
    hidden = mx.random.normal((2, 64), key=mx.random.key(0)) * 9
    raw, capped = model.raw_logits(hidden), model.logits(hidden)
    assert np.abs(np.array(raw)).max() > 3
    np.testing.assert_allclose(np.array(capped), 3 * np.tanh(np.array(raw) / 3), atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "llama_llama3_tied", "qwen3_moe", "gemma3", "gemma4_e2b", "gemma4_26b_a4b"])
def test_parameters_are_every_tensor_once(name: str) -> None:
    checkpoint = golden(name)
    model = load_model(checkpoint.typed(), mx.bfloat16)
    expected = sum(t.size for t in checkpoint.tensors.values() if isinstance(t, mx.array))
    assert sum(array.size for array in model.parameters()) == expected
    assert isinstance(model, Model)


def renamed(name: str, root: str) -> MemoryCheckpoint:
    """A text model inside a wrapper: its tensors under `root`, its configuration as `text_config`."""
    text = golden(name)
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text.config}
    tensors = {key.replace("model.", root, 1): value for key, value in text.tensors.items()}
    return MemoryCheckpoint(config, tensors)


@pytest.mark.parametrize("root", ["language_model.model.", "model.language_model."])
def test_the_text_of_a_multimodal_gemma_loads_under_both_roots(root: str) -> None:
    model = load_model(renamed("gemma3", root).typed(), mx.float32)
    np.testing.assert_allclose(whole(model, ids("gemma3")), reference("gemma3"), atol=2e-4)


def test_gemma_of_a_gguf_file_has_its_gains_baked() -> None:
    checkpoint = golden("gemma3")
    for key, value in checkpoint.tensors.items():
        if key.endswith("norm.weight"):
            assert isinstance(value, mx.array)
            checkpoint.tensors[key] = value.astype(mx.float32) + 1
    baked = MemoryCheckpoint(checkpoint.config, checkpoint.tensors, "gguf")
    np.testing.assert_allclose(
        whole(load_model(baked.typed(), mx.float32), ids("gemma3")), reference("gemma3"), atol=2e-4
    )


def test_legacy_rope_fields_of_gemma_give_the_same_logits() -> None:
    checkpoint = golden("gemma3").copy(
        rope_parameters=None,
        rope_theta=10000.0,
        rope_local_base_freq=100.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    np.testing.assert_allclose(
        whole(load_model(checkpoint.typed(), mx.float32), ids("gemma3")), reference("gemma3"), atol=2e-4
    )


def test_a_window_pattern_gives_the_layer_types_where_they_are_missing() -> None:
    explicit = golden("gemma3").copy(
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    )
    pattern = golden("gemma3").copy(layer_types=None, sliding_window_pattern=2)
    np.testing.assert_array_equal(
        whole(load_model(explicit.typed(), mx.float32), ids("gemma3")),
        whole(load_model(pattern.typed(), mx.float32), ids("gemma3")),
    )


def test_tensors_that_nobody_takes_are_one_warning_with_their_names(caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = golden("llama")
    stray: dict[str, mx.array | Weight] = {f"vision.layers.{i}.fc.weight": mx.zeros((2, 2)) for i in range(3)}
    checkpoint.tensors |= stray | {"model.extra": mx.zeros(1)}
    load_model(checkpoint.typed(), mx.float32)
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "4 tensors of the checkpoint: model.extra, vision.layers.*.fc.weight (3)" in caplog.text


def test_rotary_tables_are_left_aside_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = golden("llama")
    checkpoint.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = mx.zeros(8)
    load_model(checkpoint.typed(), mx.float32)
    assert not caplog.records


def test_a_checkpoint_without_a_token_table_is_refused() -> None:
    checkpoint = golden("llama")
    del checkpoint.tensors["model.embed_tokens.weight"]
    with pytest.raises(CheckpointError, match=r"no token embedding; looked for model\.embed_tokens\.weight"):
        load_model(checkpoint.typed(), mx.float32)


def test_windows_of_qwen_2_need_the_switch() -> None:
    with_window, without = golden("qwen2_window"), golden("qwen2_window").copy(use_sliding_window=False)
    prompt = ids("qwen2_window")
    one, two = (whole(load_model(c.typed(), mx.float32), prompt) for c in (with_window, without))
    np.testing.assert_array_equal(one[:8], two[:8])
    assert np.abs(one[9:] - two[9:]).max() > 1e-2


def test_a_forward_writes_only_its_own_rows_caches() -> None:
    model = load_model(golden("llama").typed(), mx.float32)
    rows = Rows(model, 2)
    batch: Batch = rows.batch([[5, 6, 7], []])
    model.forward(batch)
    assert [cache.offset for cache in rows.caches[0] if cache] == [3, 3, 3]
    assert [cache.offset for cache in rows.caches[1] if cache] == [0, 0, 0]


def test_the_scale_of_token_rows_is_rounded_to_their_type_as_in_training() -> None:
    model = load_model(golden("gemma3").typed(), mx.bfloat16)
    model.embedding_scale = 33.7  # type: ignore[attr-defined]
    batch = Rows(model).batch([[3, 5, 8]])
    rows, found = model.embed(batch.tokens), model.inputs(batch)  # type: ignore[attr-defined]
    assert found.dtype == mx.bfloat16
    scale = float(mx.array(33.7, mx.bfloat16))
    assert scale != 33.7
    np.testing.assert_array_equal(
        np.array(found.astype(mx.float32)),
        np.array((rows.astype(mx.float32) * scale).astype(mx.bfloat16).astype(mx.float32)),
    )
