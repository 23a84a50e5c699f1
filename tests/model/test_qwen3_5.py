"""What only Qwen 3.5 and its relatives do: dialects of files, wrappers, states that rewind, refused configurations."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from arriero.errors import CheckpointError, UnsupportedFeature
from arriero.model.architectures import load_model
from arriero.model.contract import Batch, Model, Span
from arriero.model.weight import Quantization, Weight
from arriero.runner.caches import RecurrentCache
from tests.helpers.forward import Rows, chunked, whole
from tests.helpers.memory_checkpoint import MemoryCheckpoint, quantize

pytestmark = pytest.mark.usefixtures("kernels")

GOLDENS = Path(__file__).parent / "goldens"
NAMES = ["qwen3_5", "qwen3_5_tied", "qwen3_5_moe", "qwen3_next"]
Tensors = dict[str, mx.array | Weight]


def golden(name: str) -> MemoryCheckpoint:
    return MemoryCheckpoint.golden(GOLDENS / name)


def ids(name: str) -> list[int]:
    with np.load(GOLDENS / name / "golden.npz") as file:
        found: list[int] = file["ids"].tolist()
    return found


def logits(checkpoint: MemoryCheckpoint, name: str) -> np.ndarray:
    return whole(load_model(checkpoint.typed(), mx.float32), ids(name))


def dense(tensors: Tensors) -> dict[str, mx.array]:
    return {name: value for name, value in tensors.items() if isinstance(value, mx.array)}


def as_mlx_writes_it(checkpoint: MemoryCheckpoint) -> MemoryCheckpoint:
    """Gains with their 1, kernels `[channels, K, 1]`, experts stacked, and no head for drafts."""
    found: Tensors = {}
    banks: dict[str, dict[int, mx.array]] = {}
    for name, value in dense(checkpoint.tensors).items():
        if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            found[name] = value.astype(mx.float32) + 1
        elif name.endswith("conv1d.weight"):
            found[name] = value.swapaxes(1, 2)
        elif ".mlp.experts." in name:
            layer, _, rest = name.partition(".experts.")
            expert, _, part = rest.partition(".")
            banks.setdefault(f"{layer}.switch_mlp.{part}", {})[int(expert)] = value
        else:
            found[name] = value
    stacked: Tensors = {name: mx.stack([bank[e] for e in sorted(bank)]) for name, bank in banks.items()}
    return MemoryCheckpoint(checkpoint.config, found | stacked, "mlx")


def wrapped(checkpoint: MemoryCheckpoint, root: str = "model.language_model.") -> MemoryCheckpoint:
    """The text inside a multimodal model, with a head for drafts, and tensors of a tower that nothing declares."""
    name = str(checkpoint.config["architectures"][0]).replace("ForCausalLM", "ForConditionalGeneration")
    text = checkpoint.config | {"tie_word_embeddings": False}
    config = {
        "architectures": [name],
        "text_config": text,
        "tie_word_embeddings": checkpoint.config["tie_word_embeddings"],
    }
    tensors: Tensors = {k.replace("model.", root, 1): v for k, v in checkpoint.tensors.items()}
    tensors |= {f"model.visual.blocks.{i}.norm1.weight": mx.zeros(2) for i in range(2)}
    tensors |= {"mtp.fc.weight": mx.zeros((2, 4)), "mtp.layers.0.input_layernorm.weight": mx.zeros(2)}
    return MemoryCheckpoint(config, tensors)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_mlx_converted_gives_the_same_bits(name: str) -> None:
    original = golden(name)
    np.testing.assert_array_equal(logits(as_mlx_writes_it(original), name), logits(original, name))


def test_the_dialect_is_decided_by_the_layout_of_the_convolution_whatever_the_gains_are() -> None:
    """C.3: gains of a trained model come in any size, so no gain may decide."""
    original = golden("qwen3_5")
    near_one: Tensors = {
        name: value + 1 if name.endswith("layernorm.weight") else value
        for name, value in dense(original.tensors).items()
    }
    shifted = MemoryCheckpoint(original.config, near_one)
    expected = logits(as_mlx_writes_it(shifted), "qwen3_5")
    np.testing.assert_array_equal(logits(shifted, "qwen3_5"), expected)
    assert np.abs(expected - logits(original, "qwen3_5")).max() > 1e-2


@pytest.mark.parametrize("root", ["model.language_model.", "language_model.model."])
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_tied", "qwen3_5_moe"])
def test_the_text_of_a_multimodal_checkpoint_loads_and_says_what_it_leaves_out(
    name: str, root: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        model = load_model(wrapped(golden(name), root).typed(), mx.float32)
    np.testing.assert_array_equal(whole(model, ids(name)), logits(golden(name), name))
    assert [r.getMessage() for r in caplog.records if "images are refused" in r.getMessage()] == [
        "the vision tower is not loaded, and images are refused (2 tensors)"
    ]
    assert any("predicts several tokens is left to its draft" in r.getMessage() for r in caplog.records)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    with pytest.raises(UnsupportedFeature, match="does not take images"):
        model.forward(Rows(model).batch([[3]], features=[mx.zeros((1, 48))]))


def test_a_stray_tensor_is_still_reported_beside_what_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = wrapped(golden("qwen3_5"))
    checkpoint.tensors["model.language_model.layers.0.linear_attn.extra"] = mx.zeros(1)
    load_model(checkpoint.typed(), mx.float32)
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "1 tensors of the checkpoint: model.language_model.layers.*.linear_attn.extra" in warnings[0]


def test_packed_experts_give_the_bits_of_single_ones() -> None:
    checkpoint = golden("qwen3_5_moe")
    tensors = dense(checkpoint.tensors)
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        banks = {
            part: mx.stack([tensors.pop(f"{prefix}.{e}.{part}_proj.weight") for e in range(4)])
            for part in ("gate", "up", "down")
        }
        tensors[f"{prefix}.gate_up_proj"] = mx.concatenate([banks["gate"], banks["up"]], axis=1)
        tensors[f"{prefix}.down_proj"] = banks["down"]
    packed = MemoryCheckpoint(checkpoint.config, {**tensors})
    np.testing.assert_array_equal(logits(packed, "qwen3_5_moe"), logits(checkpoint, "qwen3_5_moe"))


def split_projections(checkpoint: MemoryCheckpoint) -> MemoryCheckpoint:
    """Qwen3-Next's fused projections as Qwen 3.5 stores them, taken apart head by head."""
    tensors = dense(checkpoint.tensors)
    c = checkpoint.config
    keys, dk, dv = c["linear_num_key_heads"], c["linear_key_head_dim"], c["linear_value_head_dim"]
    shared = c["linear_num_value_heads"] // keys
    for name in [n for n in tensors if n.endswith("in_proj_qkvz.weight")]:
        prefix = name.removesuffix("in_proj_qkvz.weight")
        qkvz = np.array(tensors.pop(name).astype(mx.float32))
        ba = np.array(tensors.pop(f"{prefix}in_proj_ba.weight").astype(mx.float32))
        parts: dict[str, list[np.ndarray]] = {part: [] for part in "qkvzba"}
        for head in range(keys):
            rows = qkvz[head * (2 * dk + 2 * shared * dv) :]
            parts["q"].append(rows[:dk])
            parts["k"].append(rows[dk : 2 * dk])
            parts["v"].append(rows[2 * dk : 2 * dk + shared * dv])
            parts["z"].append(rows[2 * dk + shared * dv : 2 * dk + 2 * shared * dv])
            parts["b"].append(ba[2 * shared * head :][:shared])
            parts["a"].append(ba[2 * shared * head + shared :][:shared])
        joined = {part: np.concatenate(rows) for part, rows in parts.items()}
        tensors[f"{prefix}in_proj_qkv.weight"] = mx.array(np.concatenate([joined[p] for p in "qkv"]))
        for part in "zba":
            tensors[f"{prefix}in_proj_{part}.weight"] = mx.array(joined[part])
    return MemoryCheckpoint(checkpoint.config, {**tensors})


def test_fused_projections_give_the_bits_of_separate_ones() -> None:
    fused = golden("qwen3_next")
    np.testing.assert_array_equal(logits(split_projections(fused), "qwen3_next"), logits(fused, "qwen3_next"))


def test_both_forms_of_the_projections_are_refused() -> None:
    checkpoint = golden("qwen3_next")
    checkpoint.tensors["model.layers.0.linear_attn.in_proj_qkv.weight"] = mx.zeros((160, 64))
    with pytest.raises(CheckpointError, match=r"in_proj_qkvz\.weight and in_proj_qkv\.weight, which are the same"):
        load_model(checkpoint.typed(), mx.float32)


class TestConfiguration:
    def test_layers_follow_the_interval_where_their_types_are_missing(self) -> None:
        explicit = golden("qwen3_5")
        derived = explicit.copy(layer_types=None, full_attention_interval=3)
        np.testing.assert_array_equal(logits(derived, "qwen3_5"), logits(explicit, "qwen3_5"))

    def test_legacy_rope_fields_give_the_same_bits(self) -> None:
        legacy = golden("qwen3_5").copy(rope_parameters=None, rope_theta=10000.0, partial_rotary_factor=0.5)
        np.testing.assert_array_equal(logits(legacy, "qwen3_5"), logits(golden("qwen3_5"), "qwen3_5"))

    def test_a_quarter_of_each_head_rotates_where_nothing_is_said(self) -> None:
        silent = golden("qwen3_5").copy(rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
        said = golden("qwen3_5").copy(
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
        )
        np.testing.assert_array_equal(logits(silent, "qwen3_5"), logits(said, "qwen3_5"))

    def test_weights_of_chosen_experts_sum_to_one_where_nothing_is_said(self) -> None:
        assert "norm_topk_prob" not in golden("qwen3_5_moe").config
        said = golden("qwen3_5_moe").copy(norm_topk_prob=True)
        np.testing.assert_array_equal(logits(said, "qwen3_5_moe"), logits(golden("qwen3_5_moe"), "qwen3_5_moe"))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"layer_types": ["linear_attention", "full_attention"]}, "`layer_types` should be a list of 3"),
            ({"layer_types": ["linear_attention"] * 4}, "`layer_types` should be as long as num_hidden_layers"),
            ({"layer_types": ["sliding_attention"] * 3}, "`layer_types` should be a list of 3 out of linear_attention"),
            ({"linear_num_value_heads": 3}, "a multiple of linear_num_key_heads"),
            ({"linear_num_key_heads": None}, "`linear_num_key_heads` is missing"),
            ({"linear_conv_kernel_dim": 1}, "`linear_conv_kernel_dim` should be a whole number of at least 2"),
            ({"attn_output_gate": False}, "`attn_output_gate` should be true"),
            ({"hidden_act": "gelu"}, "`hidden_act` should be silu"),
            ({"num_experts": 4}, "Qwen3_5MoeForCausalLM"),
            ({"rope_parameters": {"rope_type": "default", "mrope_sections": [1]}}, "mrope_sections"),
            ({"sliding_window": 8}, "`sliding_window` is 8, which Qwen3_5ForCausalLM does not honour"),
        ],
    )
    def test_what_is_wrong_or_not_honoured_is_refused_by_name(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            load_model(golden("qwen3_5").copy(**changes).typed(), mx.float32)

    def test_a_mixture_without_experts_is_refused(self) -> None:
        with pytest.raises(CheckpointError, match="`num_experts` is missing"):
            load_model(golden("qwen3_5_moe").copy(num_experts=None).typed(), mx.float32)

    def test_facts_count_states_apart_from_what_grows(self) -> None:
        facts = load_model(golden("qwen3_5").typed(), mx.bfloat16).facts
        tail, state = 3 * (2 * 2 * 16 + 4 * 24) * 2, 4 * 24 * 16 * 4
        assert facts.cache_bytes_fixed == 2 * (tail + state)
        assert facts.cache_bytes_per_token == 2 * 2 * 16 * 2
        rows = Rows(load_model(golden("qwen3_5").typed(), mx.bfloat16))
        rows.logits([[1, 2, 3]])
        held = sum(cache.nbytes for cache in rows.caches[0] if isinstance(cache, RecurrentCache))
        assert held == facts.cache_bytes_fixed


class TestTensors:
    """A.16: every parameter is filled, and what contradicts the configuration is named."""

    @pytest.mark.parametrize(
        "name",
        [
            "0.linear_attn.A_log",
            "1.linear_attn.dt_bias",
            "0.linear_attn.norm.weight",
            "0.linear_attn.in_proj_b.weight",
            "1.linear_attn.conv1d.weight",
            "2.self_attn.q_norm.weight",
            "0.post_attention_layernorm.weight",
        ],
    )
    def test_a_missing_tensor_is_named(self, name: str) -> None:
        checkpoint = golden("qwen3_5")
        del checkpoint.tensors[f"model.layers.{name}"]
        with pytest.raises(CheckpointError, match=f"model.layers.{name}"):
            load_model(checkpoint.typed(), mx.float32)

    @pytest.mark.parametrize(
        ("name", "shape"),
        [
            ("0.linear_attn.conv1d.weight", (160, 4)),
            ("0.linear_attn.A_log", (2,)),
            ("0.linear_attn.in_proj_qkv.weight", (96, 48)),
            ("2.self_attn.q_proj.weight", (64, 48)),
        ],
    )
    def test_a_shape_that_contradicts_the_configuration_is_named(self, name: str, shape: tuple[int, ...]) -> None:
        checkpoint = golden("qwen3_5")
        checkpoint.tensors[f"model.layers.{name}"] = mx.zeros(shape)
        with pytest.raises(CheckpointError, match=f"model.layers.{name} has shape"):
            load_model(checkpoint.typed(), mx.float32)

    def test_without_a_convolution_the_dialect_is_not_guessed(self) -> None:
        checkpoint = golden("qwen3_5")
        for name in [n for n in checkpoint.tensors if n.endswith("conv1d.weight")]:
            del checkpoint.tensors[name]
        with pytest.raises(CheckpointError, match=r"no linear_attn\.conv1d\.weight, whose layout tells"):
            load_model(checkpoint.typed(), mx.float32)

    def test_a_mixture_needs_its_shared_expert_and_a_router_row_for_each_expert(self) -> None:
        checkpoint = golden("qwen3_5_moe")
        checkpoint.tensors["model.layers.0.mlp.gate.weight"] = mx.zeros((6, 64))
        with pytest.raises(CheckpointError, match=r"mlp\.gate\.weight has shape \[6, 64\]"):
            load_model(checkpoint.typed(), mx.float32)
        checkpoint = golden("qwen3_5_moe")
        del checkpoint.tensors["model.layers.0.mlp.shared_expert_gate.weight"]
        with pytest.raises(CheckpointError, match=r"shared_expert_gate\.weight"):
            load_model(checkpoint.typed(), mx.float32)


class TestStates:
    """Rewinding, restoring and captures inside a forward leave no trace in the bits."""

    def follow(self, model: Model, caches: list[Any], tokens: list[int], position: int) -> np.ndarray:
        batch = Batch(mx.array(tokens, mx.int32), [Span(0, len(tokens), position, caches)])
        return np.array(model.logits(model.forward(batch).final))

    @pytest.mark.parametrize("name", NAMES)
    def test_a_snapshot_at_every_offset_continues_with_the_same_bits(self, name: str) -> None:
        model, prompt = load_model(golden(name).typed(), mx.float32), ids(name)[:20]
        expected = whole(model, prompt)
        caches = model.new_caches()
        offsets = list(range(1, 20))
        for cache in caches:
            assert cache is not None
            cache.plan(offsets)
        # One forward crosses most offsets, the next single tokens, the last the rest.
        self.follow(model, caches, prompt[:13], 0)
        self.follow(model, caches, prompt[13:14], 13)
        self.follow(model, caches, prompt[14:], 14)
        taken = [cache.take() for cache in caches if cache is not None]
        for i, offset in enumerate(offsets):
            fresh = model.new_caches()
            for cache, snapshots in zip(fresh, taken, strict=True):
                assert cache is not None
                # Captures of positions chain; a state stands for all before it.
                joined = None
                for snapshot in snapshots[: i + 1]:
                    joined = cache.merge(joined, snapshot) if joined is not None else snapshot
                assert joined is not None
                assert cache.restore(joined)
                assert cache.offset == offset
            np.testing.assert_array_equal(self.follow(model, fresh, prompt[offset:], offset), expected[offset:])

    @pytest.mark.parametrize("name", NAMES)
    def test_a_rewind_to_every_offset_continues_with_the_same_bits(self, name: str) -> None:
        model, prompt = load_model(golden(name).typed(), mx.float32), ids(name)[:16]
        expected = whole(model, prompt)
        for offset in range(1, 16):
            caches = model.new_caches()
            for cache in caches:
                assert cache is not None
                cache.plan([offset])
            # What follows the offset is thrown away, as drafts are.
            self.follow(model, caches, [*prompt[:offset], 5, 6, 7], 0)
            for cache in caches:
                assert cache is not None
                (snapshot,) = cache.take()
                assert cache.rewind(offset, snapshot)
            np.testing.assert_array_equal(self.follow(model, caches, prompt[offset:], offset), expected[offset:])

    def test_rows_with_captures_at_different_offsets_share_a_forward(self) -> None:
        model, prompt = load_model(golden("qwen3_5").typed(), mx.float32), ids("qwen3_5")
        rows = Rows(model, 3)
        for row, offsets in enumerate([[4, 9], [], [7]]):
            for cache in rows.caches[row]:
                assert cache is not None
                cache.plan(offsets)
        parts = [prompt[:12], prompt[12:15], prompt[15:30]]
        found = np.split(rows.logits(parts), [12, 15])
        for part, bits in zip(parts, found, strict=True):
            np.testing.assert_array_equal(bits, whole(model, part))
        for row, offset in ((0, 9), (2, 7)):
            fresh = model.new_caches()
            for cache, old in zip(fresh, rows.caches[row], strict=True):
                assert cache is not None
                assert old is not None
                joined = None
                for snapshot in old.take():
                    joined = snapshot if joined is None else cache.merge(joined, snapshot)
                assert joined is not None
                assert cache.restore(joined)
            rest = parts[row][offset:]
            np.testing.assert_array_equal(self.follow(model, fresh, rest, offset), whole(model, parts[row])[offset:])


def test_sixteen_bit_models_keep_decay_and_gains_in_float32() -> None:
    model: Any = load_model(golden("qwen3_5").typed(), mx.bfloat16)
    mixer, attention = model.layers[0].mixer, model.layers[2].mixer
    kept = [mixer.rate, mixer.bias, mixer.gain, model.norm.gain, mixer.before.gain, attention.query_norm.gain]
    assert {array.dtype for array in kept} == {mx.float32}
    stored = golden("qwen3_5").tensors["model.layers.0.input_layernorm.weight"]
    assert isinstance(stored, mx.array)
    np.testing.assert_array_equal(np.array(mixer.before.gain), np.array(stored.astype(mx.float32)) + 1)


def test_a_decay_that_is_stored_finer_than_the_activations_is_not_rounded_to_them() -> None:
    checkpoint, name = golden("qwen3_5"), "model.layers.0.linear_attn.A_log"
    fine = mx.random.normal(checkpoint.info(name).shape, key=mx.random.key(4))
    checkpoint.tensors[name] = fine
    model: Any = load_model(checkpoint.typed(), mx.bfloat16)
    np.testing.assert_array_equal(np.array(model.layers[0].mixer.rate), np.array(mx.exp(fine)))


@pytest.mark.parametrize("name", NAMES)
def test_taps_are_the_residuals_behind_layers_of_either_kind(name: str) -> None:
    model: Any = load_model(golden(name).typed(), mx.float32)
    prompt = ids(name)
    last = len(model.layers) - 1
    hidden = model.forward(Rows(model).batch([prompt], taps=[last, 0]))
    tapped, first = mx.split(hidden.taps, 2, axis=-1)
    np.testing.assert_array_equal(np.array(model.norm(tapped)), np.array(hidden.final))
    rows = Rows(model).batch([prompt])
    np.testing.assert_array_equal(np.array(model.layers[0](model.embed(rows.tokens), rows, 0)), np.array(first))
    np.testing.assert_array_equal(np.array(model.raw_logits(hidden.final)), np.array(model.logits(hidden.final)))


@pytest.mark.parametrize(
    "how", [Quantization("affine", 4, 32), Quantization("nvfp4", 4, 16)], ids=lambda how: str(how.name)
)
def test_a_packed_mixture_is_the_mixture_of_its_decoded_weights(how: Quantization) -> None:
    packed = golden("qwen3_5_moe").quantized(how, ".weight")
    model = load_model(packed.typed(), mx.float32)
    found = whole(model, ids("qwen3_5_moe"))
    np.testing.assert_allclose(found, logits(packed.dequantized(), "qwen3_5_moe"), atol=5e-4)
    np.testing.assert_array_equal(chunked(model, ids("qwen3_5_moe"), (1, 7, 3)), found)


def scaled(names: Callable[[str], bool]) -> MemoryCheckpoint:
    """The mixture in NVFP4, each chosen matrix with a global scale of its own that the codes make up for."""
    checkpoint = golden("qwen3_5_moe")
    for i, (name, value) in enumerate(dense(checkpoint.tensors).items()):
        if names(name):
            factor = 4.0 ** (i % 5 - 2)
            packed = quantize(value / factor, Quantization("nvfp4", 4, 16))
            checkpoint.tensors[name] = Weight(
                packed.data, packed.quantization, packed.scales, None, mx.array(factor, mx.float32)
            )
    return checkpoint


def test_global_scales_of_experts_and_projections_are_honoured() -> None:
    def projection(name: str) -> bool:
        return name.endswith("_proj.weight") or "in_proj_" in name

    packed = scaled(projection)
    assert any(isinstance(value, Weight) for name, value in packed.tensors.items() if ".experts." in name)
    np.testing.assert_allclose(
        logits(packed, "qwen3_5_moe"), logits(packed.dequantized(), "qwen3_5_moe"), rtol=1e-4, atol=5e-4
    )


def test_a_permutation_of_the_experts_in_the_file_changes_nothing_that_it_should_not() -> None:
    """A bank's scales go with their experts: experts 0 and 3 trade places, and so do their router rows."""
    packed = scaled(lambda name: ".experts." in name)
    swapped = dict(packed.tensors)
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp"
        for part in ("gate_proj", "up_proj", "down_proj"):
            names = [f"{prefix}.experts.{e}.{part}.weight" for e in (0, 3)]
            swapped[names[0]], swapped[names[1]] = packed.tensors[names[1]], packed.tensors[names[0]]
        gate = packed.tensors[f"{prefix}.gate.weight"]
        assert isinstance(gate, mx.array)
        swapped[f"{prefix}.gate.weight"] = gate[mx.array([3, 1, 2, 0])]
    other = MemoryCheckpoint(packed.config, swapped)
    np.testing.assert_allclose(logits(other, "qwen3_5_moe"), logits(packed, "qwen3_5_moe"), atol=1e-4)
