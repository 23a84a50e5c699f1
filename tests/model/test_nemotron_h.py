"""What only Nemotron-H does: layers by pattern, names and layouts of files, states that rewind, refused fields."""

from __future__ import annotations

import logging
import math
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from arriero.errors import CheckpointError
from arriero.model.architectures import load_model
from arriero.model.architectures.nemotron_h import read_limits
from arriero.model.checkpoint import Checkpoint
from arriero.model.layers.config import Fields
from arriero.model.quantization import Quantization
from arriero.model.weight import Weight
from arriero.runner.caches import RecurrentCache
from tests.helpers.forward import Rows, chunked, whole
from tests.helpers.golden_store import create_golden
from tests.helpers.memory_checkpoint import MemoryCheckpoint, quantize
from tests.helpers.rewinds import held

pytestmark = pytest.mark.usefixtures("kernels")

GOLDENS = Path(__file__).parent / "goldens"
NAMES = ["nemotron_h", "nemotron_h_moe", "nemotron_h_latent"]
Tensors = dict[str, mx.array | Weight]


def golden(name: str) -> MemoryCheckpoint:
    return MemoryCheckpoint.golden(GOLDENS / name)


def ids(name: str) -> list[int]:
    with np.load(GOLDENS / name / "golden.npz") as file:
        found: list[int] = file["ids"].tolist()
    return found


def logits(checkpoint: MemoryCheckpoint, name: str) -> np.ndarray:
    return whole(load_model(checkpoint.typed(), mx.float32), ids(name))


def renamed(checkpoint: MemoryCheckpoint) -> MemoryCheckpoint:
    """As transformers' own classes name them, experts stacked."""
    found: Tensors = {}
    banks: dict[str, dict[int, mx.array]] = {}
    for name, value in checkpoint.tensors.items():
        match = re.fullmatch(r"backbone\.(.*\.experts)\.(\d+)\.(\w+)\.weight", name)
        if match:
            assert isinstance(value, mx.array)
            banks.setdefault(f"model.{match[1]}.{match[3]}", {})[int(match[2])] = value
        else:
            found[name.replace("backbone.", "model.")] = value
    stacked: Tensors = {name: mx.stack([bank[e] for e in sorted(bank)]) for name, bank in banks.items()}
    return MemoryCheckpoint(checkpoint.config, found | stacked)


def as_mlx_writes_it(checkpoint: MemoryCheckpoint) -> MemoryCheckpoint:
    """Kernels `[channels, K, 1]`, experts stacked under other names, no head for drafts."""
    found: Tensors = {}
    for name, value in renamed(checkpoint).tensors.items():
        assert isinstance(value, mx.array)
        for ours, theirs in (("up_proj", "fc1"), ("down_proj", "fc2")):
            name = name.replace(f"mixer.experts.{ours}", f"mixer.switch_mlp.{theirs}.weight")
        found[name.replace("model.", "backbone.")] = value.swapaxes(1, 2) if "conv1d.weight" in name else value
    return MemoryCheckpoint(checkpoint.config, found, "mlx")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", [renamed, as_mlx_writes_it])
def test_other_names_and_layouts_give_the_same_bits(name: str, layout: Any, caplog: pytest.LogCaptureFixture) -> None:
    original = golden(name)
    np.testing.assert_array_equal(logits(layout(original), name), logits(original, name))
    assert not caplog.records


def test_the_head_for_drafts_is_left_out_and_named(caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = golden("nemotron_h_moe").copy(num_nextn_predict_layers=1)
    checkpoint.tensors |= {f"mtp.layers.0.{name}.weight": mx.zeros(2) for name in ("enorm", "hnorm")}
    with caplog.at_level(logging.INFO):
        load_model(checkpoint.typed(), mx.float32)
    assert "predicts several tokens is not loaded" in caplog.text
    assert "(2 tensors)" in caplog.text
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def published_in_4_bits() -> MemoryCheckpoint:
    """Every projection in NVFP4 with a global scale of its own that the codes make up for, and scales for caches."""
    checkpoint = golden("nemotron_h_latent")
    for i, (name, value) in enumerate(list(checkpoint.tensors.items())):
        if name.endswith("_proj.weight") and value.shape[-1] % 32 == 0:
            assert isinstance(value, mx.array)
            factor = 4.0 ** (i % 5 - 2)
            packed = quantize(value / factor, Quantization("nvfp4", 4, 16))
            scale = mx.array(factor, mx.float32)
            checkpoint.tensors[name] = Weight(packed.data, packed.quantization, packed.scales, None, scale)
    checkpoint.tensors |= {f"backbone.layers.2.mixer.{n}_proj.{n}_scale": mx.ones(1) for n in "kv"}
    return checkpoint


def test_global_scales_of_experts_and_projections_are_honoured(caplog: pytest.LogCaptureFixture) -> None:
    packed = published_in_4_bits()
    assert any(".experts." in name and isinstance(value, Weight) for name, value in packed.tensors.items())
    expected = logits(packed.dequantized(), "nemotron_h_latent")
    np.testing.assert_allclose(logits(packed, "nemotron_h_latent"), expected, rtol=1e-4, atol=5e-4)
    assert not caplog.records


def test_a_stray_tensor_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = golden("nemotron_h")
    checkpoint.tensors["backbone.layers.0.mixer.extra"] = mx.zeros(1)
    load_model(checkpoint.typed(), mx.float32)
    assert "1 tensors of the checkpoint: backbone.layers.*.mixer.extra" in caplog.text


def test_a_configuration_with_a_bare_infinity_is_imported(tmp_path: Path) -> None:
    """As Nemotron 3's is published, though JSON has no such number."""

    def bare(text: str) -> str:
        return re.sub(r"\{\s*\"__float__\": \"Infinity\"\s*\}", "Infinity", text)

    stored = create_golden(tmp_path, GOLDENS / "nemotron_h", bare)
    checkpoint = Checkpoint.open(stored.source())
    assert checkpoint.config["time_step_limit"] == [0.0, math.inf]
    found = whole(load_model(checkpoint, mx.float32), ids("nemotron_h"))
    np.testing.assert_array_equal(found, logits(golden("nemotron_h"), "nemotron_h"))
    assert stored.details.family == "nemotron_h"


class TestConfiguration:
    @pytest.mark.parametrize(
        "changes",
        [
            {"layers_block_type": None, "hybrid_override_pattern": "M-*M"},
            {"layers_block_type": None, "hybrid_override_pattern": "M-*M", "num_hidden_layers": 4},
            {"layers_block_type": None, "layer_types": ["mamba", "mlp", "attention", "mamba"]},
            {"head_dim": None, "attention_head_dim": 16},
            {"layer_norm_epsilon": None, "rms_norm_eps": 1e-5},
            {"time_step_limit": None},
            {"time_step_limit": [0.0, math.inf]},
        ],
    )
    def test_other_spellings_give_the_same_bits(self, changes: dict[str, Any]) -> None:
        spelled = golden("nemotron_h").copy(**changes)
        np.testing.assert_array_equal(logits(spelled, "nemotron_h"), logits(golden("nemotron_h"), "nemotron_h"))

    def test_initial_steps_are_no_limits(self) -> None:
        """The reference's prefill holds steps above `time_step_min`, but its kernels and its decoding don't."""
        other = golden("nemotron_h").copy(time_step_min=0.5, time_step_max=0.6)
        np.testing.assert_array_equal(logits(other, "nemotron_h"), logits(golden("nemotron_h"), "nemotron_h"))

    def test_limits_of_the_step_are_honoured(self) -> None:
        held_back = logits(golden("nemotron_h").copy(time_step_limit=[0.0, 0.5]), "nemotron_h")
        assert np.abs(held_back - logits(golden("nemotron_h"), "nemotron_h")).max() > 1e-2

    def test_infinity_may_be_an_object(self) -> None:
        limits = {"time_step_limit": [0.25, {"__float__": "Infinity"}]}
        assert read_limits(Fields(limits)) == (0.25, math.inf)

    @pytest.mark.parametrize("limits", [[0.5], [0.5, 0.5], [-1, 1], [0, "inf"], 3, [0, {"__float__": "NaN"}]])
    def test_limits_that_are_none_are_refused(self, limits: Any) -> None:
        with pytest.raises(CheckpointError, match="`time_step_limit` should be two rising numbers"):
            read_limits(Fields({"time_step_limit": limits}))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"layers_block_type": ["mamba", "conv"]}, "`layers_block_type` should be kinds of layers out of M, "),
            ({"layers_block_type": None}, "`layers_block_type` should be kinds of layers"),
            ({"layers_block_type": None, "hybrid_override_pattern": "M-|*"}, "`hybrid_override_pattern` should be"),
            ({"num_hidden_layers": 5}, r"`layers_block_type` should be as long as num_hidden_layers \(5\)"),
            ({"n_groups": 4}, r"`n_groups` should be a divisor of mamba_num_heads \(6\)"),
            ({"mlp_hidden_act": "silu"}, "`mlp_hidden_act` should be relu2"),
            ({"mamba_hidden_act": "gelu"}, "`mamba_hidden_act` should be silu"),
            ({"residual_in_fp32": True}, "`residual_in_fp32` should be false"),
            ({"mamba_proj_bias": True}, "`mamba_proj_bias` should be false"),
            ({"conv_kernel": 1}, "`conv_kernel` should be a whole number of at least 2"),
            ({"sliding_window": 8}, "`sliding_window` is 8, which NemotronHForCausalLM does not honour"),
        ],
    )
    def test_what_is_wrong_or_not_honoured_is_refused_by_name(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            load_model(golden("nemotron_h").copy(**changes).typed(), mx.float32)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"n_shared_experts": 2}, "`n_shared_experts` should be 1"),
            ({"num_experts_per_tok": 9}, "`num_experts_per_tok` should be at most 8"),
            ({"moe_intermediate_size": None}, "`moe_intermediate_size` is missing"),
        ],
    )
    def test_a_mixture_s_fields_are_refused_by_name(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            load_model(golden("nemotron_h_moe").copy(**changes).typed(), mx.float32)

    def test_facts_count_states_apart_from_what_grows(self) -> None:
        model = load_model(golden("nemotron_h").typed(), mx.bfloat16)
        tail, state = 3 * (72 + 2 * 2 * 20) * 2, 72 * 20 * 4
        assert model.facts.cache_bytes_fixed == 2 * (tail + state)
        assert model.facts.cache_bytes_per_token == 2 * 2 * 16 * 2
        rows = Rows(model)
        rows.logits([[1, 2, 3]])
        states = [cache for cache in rows.caches[0] if isinstance(cache, RecurrentCache)]
        assert sum(cache.nbytes for cache in states) == model.facts.cache_bytes_fixed
        assert [cache is None for cache in rows.caches[0]] == [False, True, False, False]


class TestTensors:
    @pytest.mark.parametrize(
        ("golden_name", "name"),
        [
            ("nemotron_h", "layers.0.mixer.A_log"),
            ("nemotron_h", "layers.0.mixer.D"),
            ("nemotron_h", "layers.3.mixer.dt_bias"),
            ("nemotron_h", "layers.0.mixer.norm.weight"),
            ("nemotron_h", "layers.0.mixer.conv1d.bias"),
            ("nemotron_h", "layers.0.mixer.in_proj.bias"),
            ("nemotron_h", "layers.1.mixer.up_proj.bias"),
            ("nemotron_h", "layers.2.mixer.k_proj.weight"),
            ("nemotron_h", "layers.2.norm.weight"),
            ("nemotron_h", "norm_f.weight"),
            ("nemotron_h_moe", "layers.1.mixer.gate.e_score_correction_bias"),
            ("nemotron_h_moe", "layers.3.mixer.experts.7.down_proj.weight"),
            ("nemotron_h_moe", "layers.3.mixer.shared_experts.up_proj.weight"),
            ("nemotron_h_latent", "layers.0.mixer.fc2_latent_proj.weight"),
        ],
    )
    def test_a_missing_tensor_is_named(self, golden_name: str, name: str) -> None:
        checkpoint = golden(golden_name)
        del checkpoint.tensors[f"backbone.{name}"]
        with pytest.raises(CheckpointError, match=re.escape(f"backbone.{name}")):
            load_model(checkpoint.typed(), mx.float32)

    @pytest.mark.parametrize(
        ("name", "shape"),
        [
            ("conv1d.weight", (152, 4)),
            ("in_proj.weight", (229, 48)),
            ("A_log", (6, 1)),
            ("norm.weight", (2, 36)),
            ("out_proj.weight", (48, 70)),
        ],
    )
    def test_a_shape_that_contradicts_the_configuration_is_named(self, name: str, shape: tuple[int, ...]) -> None:
        checkpoint = golden("nemotron_h")
        checkpoint.tensors[f"backbone.layers.0.mixer.{name}"] = mx.zeros(shape)
        with pytest.raises(CheckpointError, match=rf"backbone\.layers\.0\.mixer\.{re.escape(name)} has shape"):
            load_model(checkpoint.typed(), mx.float32)

    def test_a_bias_that_the_configuration_denies_is_refused(self) -> None:
        checkpoint = golden("nemotron_h").copy(use_conv_bias=False)
        with pytest.raises(CheckpointError, match=r"conv1d\.bias, but its configuration says that convolutions have"):
            load_model(checkpoint.typed(), mx.float32)

    def test_without_a_token_table_the_known_names_are_listed(self) -> None:
        checkpoint = golden("nemotron_h")
        del checkpoint.tensors["backbone.embeddings.weight"]
        with pytest.raises(
            CheckpointError, match=r"looked for backbone\.embeddings\.weight, model\.embeddings\.weight"
        ):
            load_model(checkpoint.typed(), mx.float32)


def test_tokens_sorted_by_expert_give_the_bits_of_few_at_a_time() -> None:
    model = load_model(golden("nemotron_h_latent").typed(), mx.float32)
    prompt = ids("nemotron_h_latent") * 2
    np.testing.assert_array_equal(whole(model, prompt), chunked(model, prompt, (9,)))


def test_sixteen_bit_models_keep_states_and_routers_in_float32() -> None:
    model: Any = load_model(golden("nemotron_h_latent").typed(), mx.bfloat16)
    experts, mamba = model.layers[0].mixer, model.layers[1].mixer
    kept = [mamba.rate, mamba.bias, mamba.skip, mamba.gain, experts.router.correction, experts.router.gate.weight.data]
    assert {array.dtype for array in kept} == {mx.float32}
    (state,) = [cache for cache in held(model.new_caches()) if isinstance(cache, RecurrentCache)]
    assert [array.dtype for array in state.get()] == [mx.bfloat16, mx.float32]


def test_a_decay_that_is_stored_finer_than_the_activations_is_not_rounded_to_them() -> None:
    checkpoint, name = golden("nemotron_h_latent"), "backbone.layers.1.mixer.A_log"
    fine = mx.random.normal(checkpoint.info(name).shape, key=mx.random.key(4))
    checkpoint.tensors[name] = fine
    model: Any = load_model(checkpoint.typed(), mx.bfloat16)
    np.testing.assert_array_equal(np.array(model.layers[1].mixer.rate), np.array(mx.exp(fine)))


@pytest.mark.parametrize("name", NAMES)
def test_taps_are_the_residuals_behind_layers_of_any_kind(name: str) -> None:
    model: Any = load_model(golden(name).typed(), mx.float32)
    prompt = ids(name)
    last = len(model.layers) - 1
    hidden = model.forward(Rows(model).batch([prompt], taps=[last, 0]))
    tapped, first = mx.split(hidden.taps, 2, axis=-1)
    np.testing.assert_array_equal(np.array(model.norm(tapped)), np.array(hidden.final))
    rows = Rows(model).batch([prompt])
    np.testing.assert_array_equal(np.array(model.layers[0](model.embed(rows.tokens), rows, 0)), np.array(first))


@pytest.mark.parametrize(
    "how", [Quantization("affine", 4, 32), Quantization("nvfp4", 4, 16)], ids=lambda how: str(how.name)
)
def test_a_packed_model_is_the_model_of_its_decoded_weights(how: Quantization) -> None:
    packed = golden("nemotron_h_latent").quantized(how, "_proj.weight")
    assert sum(isinstance(value, Weight) for value in packed.tensors.values()) > 16
    model = load_model(packed.typed(), mx.float32)
    found = whole(model, ids("nemotron_h_latent"))
    np.testing.assert_allclose(found, logits(packed.dequantized(), "nemotron_h_latent"), atol=5e-4)
    np.testing.assert_array_equal(chunked(model, ids("nemotron_h_latent"), (1, 7, 3)), found)
