"""What only gpt-oss does: experts in four layouts, clamped activations, sinks, refused fields."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from arriero.errors import CheckpointError
from arriero.model.architectures import load_model
from arriero.model.architectures.gpt_oss import Config
from arriero.model.architectures.gpt_oss_experts import Router, clamped_swiglu
from arriero.model.checkpoint import Checkpoint
from arriero.model.layers.linear import Linear
from arriero.model.quantization import Quantization
from arriero.model.weight import Weight
from tests.helpers.forward import chunked, whole
from tests.helpers.golden_store import create_golden
from tests.helpers.memory_checkpoint import MemoryCheckpoint, dequantize, quantize

pytestmark = pytest.mark.usefixtures("kernels")

GOLDENS = Path(__file__).parent / "goldens"
NAMES = ["gpt_oss", "gpt_oss_mxfp4"]
MXFP4 = Quantization("mxfp4", 4, 32)
Tensors = dict[str, mx.array | Weight]


def golden(name: str) -> MemoryCheckpoint:
    return MemoryCheckpoint.golden(GOLDENS / name)


def ids(name: str) -> list[int]:
    with np.load(GOLDENS / name / "golden.npz") as file:
        found: list[int] = file["ids"].tolist()
    return found


def logits(checkpoint: MemoryCheckpoint, name: str) -> np.ndarray:
    return whole(load_model(checkpoint.typed(), mx.float32), ids(name))


def array(checkpoint: MemoryCheckpoint, name: str) -> mx.array:
    value = checkpoint.tensors[name]
    assert isinstance(value, mx.array)
    return value


def decoded(checkpoint: MemoryCheckpoint) -> MemoryCheckpoint:
    """Packed experts as the dense matrices that they mean, in by out."""
    found: Tensors = dict(checkpoint.tensors)
    for name in [name for name in found if name.endswith("_blocks")]:
        stem = name.removesuffix("_blocks")
        words = array(checkpoint, name).flatten(-2).view(mx.uint32)
        dense = dequantize(Weight(words, MXFP4, array(checkpoint, f"{stem}_scales")))
        del found[name], found[f"{stem}_scales"]
        found[stem] = dense.swapaxes(-1, -2)
    return MemoryCheckpoint(checkpoint.config, found)


def as_mlx_writes_it(checkpoint: MemoryCheckpoint) -> MemoryCheckpoint:
    """Gate and up apart, out by in, packed where they were."""
    found: Tensors = {}
    for name, value in checkpoint.tensors.items():
        match = re.fullmatch(r"(.*\.experts)\.(gate_up|down)_proj(_bias|_blocks)?", name)
        if not match:
            if not name.endswith("_scales"):
                found[name] = value
            continue
        assert isinstance(value, mx.array)
        rows: Weight | mx.array = value
        if match[3] == "_blocks":
            scales = array(checkpoint, name.replace("_blocks", "_scales"))
            rows = Weight(value.flatten(-2).view(mx.uint32), MXFP4, scales)
        elif match[3] is None:
            rows = Weight(value.swapaxes(-1, -2))
        suffix = "bias" if match[3] == "_bias" else "weight"
        parts = {"gate": slice(0, None, 2), "up": slice(1, None, 2)} if match[2] == "gate_up" else {"down": slice(None)}
        for part, which in parts.items():
            found[f"{match[1]}.{part}_proj.{suffix}"] = rows.rows(which) if isinstance(rows, Weight) else rows[:, which]
    return MemoryCheckpoint(checkpoint.config, found, "mlx")


def test_packed_experts_are_their_decoded_ones() -> None:
    packed = golden("gpt_oss_mxfp4")
    np.testing.assert_allclose(logits(decoded(packed), "gpt_oss_mxfp4"), logits(packed, "gpt_oss_mxfp4"), atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_gate_and_up_apart_give_the_same_bits(name: str, caplog: pytest.LogCaptureFixture) -> None:
    original = golden(name)
    np.testing.assert_array_equal(logits(as_mlx_writes_it(original), name), logits(original, name))
    assert not caplog.records


def test_experts_that_mlx_packed_affinely_are_their_decoded_ones() -> None:
    parts = as_mlx_writes_it(decoded(golden("gpt_oss_mxfp4")))
    for name, value in parts.tensors.items():
        if ".experts." in name and name.endswith("weight"):
            assert isinstance(value, Weight)
            parts.tensors[name] = quantize(value.data, Quantization("affine", 4, 32))
    found = logits(parts, "gpt_oss_mxfp4")
    np.testing.assert_allclose(found, logits(parts.dequantized(), "gpt_oss_mxfp4"), atol=5e-4)


def test_gate_and_up_may_be_packed_differently() -> None:
    parts = as_mlx_writes_it(decoded(golden("gpt_oss_mxfp4")))
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.experts.up_proj.weight"
        value = parts.tensors[name]
        assert isinstance(value, Weight)
        parts.tensors[name] = quantize(value.data, MXFP4)
    found = logits(parts, "gpt_oss_mxfp4")
    np.testing.assert_allclose(found, logits(golden("gpt_oss_mxfp4"), "gpt_oss_mxfp4"), atol=1e-4)


def test_tokens_sorted_by_expert_give_the_bits_of_few_at_a_time() -> None:
    for name in NAMES:
        model, prompt = load_model(golden(name).typed(), mx.float32), ids(name) * 2
        np.testing.assert_array_equal(whole(model, prompt), chunked(model, prompt, (9,)))


def test_a_stored_model_keeps_its_blocks(tmp_path: Path) -> None:
    stored = create_golden(tmp_path, GOLDENS / "gpt_oss_mxfp4")
    found = whole(load_model(Checkpoint.open(stored.source()), mx.float32), ids("gpt_oss_mxfp4"))
    np.testing.assert_array_equal(found, logits(golden("gpt_oss_mxfp4"), "gpt_oss_mxfp4"))


class TestActivation:
    def test_it_is_that_of_the_formula(self) -> None:
        gate, up = (mx.random.normal((5, 7), key=mx.random.key(i)) * 6 for i in range(2))
        g, u = np.minimum(np.array(gate), 4.0), np.clip(np.array(up), -4.0, 4.0)
        want = g / (1 + np.exp(-1.5 * g)) * (u + 1)
        np.testing.assert_allclose(np.array(clamped_swiglu(gate, up, 1.5, 4.0)), want, rtol=1e-5, atol=1e-6)

    def test_sixteen_bits_are_rounded_once(self) -> None:
        gate, up = (mx.random.normal((64, 64), key=mx.random.key(i)).astype(mx.bfloat16) for i in range(2))
        narrow = clamped_swiglu(gate, up, 1.702, 7.0)
        wide = clamped_swiglu(gate.astype(mx.float32), up.astype(mx.float32), 1.702, 7.0)
        assert narrow.dtype == mx.bfloat16
        np.testing.assert_array_equal(
            np.array(narrow.astype(mx.float32)), np.array(wide.astype(mx.bfloat16).astype(mx.float32))
        )

    @pytest.mark.parametrize("changes", [{"swiglu_alpha": 1.0}, {"swiglu_limit": 0.4}])
    def test_its_constants_are_those_of_the_configuration(self, changes: dict[str, Any]) -> None:
        other = logits(golden("gpt_oss").copy(**changes), "gpt_oss")
        assert np.abs(other - logits(golden("gpt_oss"), "gpt_oss")).max() > 1e-2


def test_weights_are_the_softmax_of_the_chosen_logits_alone() -> None:
    rows, bias = mx.random.normal((9, 6), key=mx.random.key(0)), mx.array([0.0, 3.0, 0, 0, 0, -3.0])
    router = Router(Linear(Weight(mx.eye(6)), bias), 2)
    chosen, weights = router(rows)
    scores = np.array(rows) + np.array(bias)
    want = np.sort(scores, axis=1)[:, :3:-1]
    np.testing.assert_array_equal(np.array(chosen), np.argsort(-scores, axis=1)[:, :2])
    np.testing.assert_allclose(np.array(weights), np.exp(want) / np.exp(want).sum(axis=1, keepdims=True), rtol=1e-5)


class TestConfiguration:
    def test_layers_take_turns_where_nothing_is_said(self) -> None:
        silent = golden("gpt_oss").copy(layer_types=None)
        np.testing.assert_array_equal(logits(silent, "gpt_oss"), logits(golden("gpt_oss"), "gpt_oss"))

    def test_the_bounds_of_yarn_are_not_truncated(self) -> None:
        truncated = golden("gpt_oss")
        rope = {**truncated.config["rope_parameters"], "truncate": True}
        other = logits(truncated.copy(rope_parameters=rope), "gpt_oss")
        assert np.abs(other - logits(golden("gpt_oss"), "gpt_oss")).max() > 1e-2

    def test_rotation_is_the_published_one_where_nothing_is_said(self) -> None:
        rope = Config.read(golden("gpt_oss").copy(rope_parameters=None).config).rope
        assert (rope.kind, rope.theta) == ("yarn", 150000.0)
        assert rope.parameters is not None
        assert (rope.parameters["factor"], rope.parameters["truncate"]) == (32.0, False)
        assert rope.extended_length == 131072

    def test_the_published_fields_are_read(self) -> None:
        """As the published 20b's config.json says them."""
        config = Config.read(
            {
                "architectures": ["GptOssForCausalLM"],
                "attention_bias": True,
                "experts_per_token": 4,
                "head_dim": 64,
                "hidden_act": "silu",
                "hidden_size": 2880,
                "initial_context_length": 4096,
                "intermediate_size": 2880,
                "layer_types": ["sliding_attention", "full_attention"] * 12,
                "max_position_embeddings": 131072,
                "num_attention_heads": 64,
                "num_experts_per_tok": 4,
                "num_hidden_layers": 24,
                "num_key_value_heads": 8,
                "num_local_experts": 32,
                "quantization_config": {"quant_method": "mxfp4"},
                "rms_norm_eps": 1e-05,
                "rope_scaling": {
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "factor": 32.0,
                    "original_max_position_embeddings": 4096,
                    "rope_type": "yarn",
                    "truncate": False,
                },
                "rope_theta": 150000,
                "sliding_window": 128,
                "swiglu_limit": 7.0,
                "tie_word_embeddings": False,
                "vocab_size": 201088,
            }
        )
        assert [attention.window for attention in config.attention] == [128, None] * 12
        assert (config.experts.alpha, config.experts.limit) == (1.702, 7.0)
        assert config.rope.parameters is not None
        assert config.rope.parameters["truncate"] is False

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"hidden_act": "gelu"}, "`hidden_act` should be silu"),
            ({"layer_types": ["full_attention"]}, "`layer_types` should be a list of 3"),
            ({"num_experts_per_tok": 6}, r"at most the number of experts \(5\)"),
            ({"swiglu_limit": 0}, "`swiglu_limit` should be a positive number"),
            ({"final_logit_softcapping": 30.0}, "which GptOssForCausalLM does not honour"),
        ],
    )
    def test_what_is_wrong_or_not_honoured_is_refused_by_name(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            load_model(golden("gpt_oss").copy(**changes).typed(), mx.float32)


class TestTensors:
    @pytest.mark.parametrize(
        "name",
        [
            "self_attn.sinks",
            "self_attn.q_proj.bias",
            "mlp.router.bias",
            "mlp.experts.gate_up_proj_bias",
            "mlp.experts.gate_up_proj_scales",
            "mlp.experts.down_proj_blocks",
        ],
    )
    def test_a_missing_tensor_is_named(self, name: str) -> None:
        checkpoint = golden("gpt_oss_mxfp4")
        del checkpoint.tensors[f"model.layers.1.{name}"]
        with pytest.raises(CheckpointError, match=f"model.layers.1.{name}"):
            load_model(checkpoint.typed(), mx.float32)

    @pytest.mark.parametrize(
        ("name", "shape"),
        [
            ("self_attn.sinks", (2,)),
            ("mlp.experts.gate_up_proj_blocks", (4, 192, 1, 32)),
            ("mlp.experts.down_proj_scales", (4, 64, 2)),
            ("mlp.experts.down_proj_bias", (4, 96)),
        ],
    )
    def test_a_shape_that_contradicts_the_configuration_is_named(self, name: str, shape: tuple[int, ...]) -> None:
        checkpoint = golden("gpt_oss_mxfp4")
        checkpoint.tensors[f"model.layers.0.{name}"] = mx.zeros(shape, mx.uint8)
        with pytest.raises(CheckpointError, match=rf"model\.layers\.0\.{name} has shape"):
            load_model(checkpoint.typed(), mx.float32)

    def test_blocks_that_are_no_bytes_are_refused(self) -> None:
        checkpoint = golden("gpt_oss_mxfp4")
        checkpoint.tensors["model.layers.0.mlp.experts.down_proj_scales"] = mx.zeros((4, 64, 3))
        with pytest.raises(
            CheckpointError, match=r"down_proj_blocks and _scales are mlx\.core\.uint8 and mlx\.core\.float32"
        ):
            load_model(checkpoint.typed(), mx.float32)

    def test_experts_packed_along_their_outputs_are_refused(self) -> None:
        """Where width and hidden size are equal, as in the published models, no shape could tell."""
        checkpoint = decoded(golden("gpt_oss_mxfp4"))
        name = "model.layers.0.mlp.experts.gate_up_proj"
        checkpoint.tensors[name] = quantize(checkpoint.tensors[name], Quantization("affine", 4, 32))
        with pytest.raises(CheckpointError, match="its groups run the wrong way"):
            load_model(checkpoint.typed(), mx.float32)
