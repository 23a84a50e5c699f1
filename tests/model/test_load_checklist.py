"""Silent errors of Flash Next's checkpoints, each made loud: what a wrong file would turn into wrong answers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from arriero.errors import CheckpointError
from arriero.formats.codes import E2M1, E4M3
from arriero.model.architectures import load_model
from arriero.model.checkpoint import Checkpoint
from arriero.source import FolderSource
from tests.helpers import flash_next as fn
from tests.helpers.forward import whole

IDS = fn.golden_ids()
EXPERTS = f"{fn.ROOT}layers.1.mlp.experts"
NAMES = sorted(fn.published(fn.golden_tensors()))


def tensors() -> fn.Tensors:
    return fn.published(fn.golden_tensors())


def opened(path: Path, held: fn.Tensors, settings: dict[str, Any] | None = None) -> Checkpoint:
    return fn.folder(path, held, settings)


def refuse(path: Path, held: fn.Tensors, message: str, settings: dict[str, Any] | None = None) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_model(opened(path, held, settings), mx.float32)


def logits(path: Path, held: fn.Tensors, dtype: mx.Dtype = mx.float32) -> np.ndarray:
    return whole(load_model(opened(path, held), dtype), IDS)


class TestEveryTensor:
    @pytest.mark.parametrize("name", NAMES)
    def test_none_may_be_missing(self, tmp_path: Path, name: str) -> None:
        held = tensors()
        del held[name]
        with pytest.raises(CheckpointError) as error:
            load_model(opened(tmp_path, held), mx.float32)
        assert name.removesuffix(".weight").rpartition(".")[2] in str(error.value)

    @pytest.mark.parametrize(
        "name",
        [
            f"{fn.ROOT}norm.weight",
            f"{fn.ROOT}layers.0.self_attn.indexer.k_layernorm.weight",
            f"{fn.ROOT}layers.1.mlp.gate.e_score_correction_bias",
            f"{fn.ROOT}layers.1.mlp.experts.4.up_proj.weight",
            f"{fn.TABLE}.shard_4.weight",
            f"{fn.ROOT}layers.3.linear_attn.A_log",
            f"{fn.ROOT}hyper_connection_mixer.block_inject_weight.weight",
        ],
    )
    def test_none_may_be_there_that_nobody_takes(self, tmp_path: Path, name: str) -> None:
        refuse(tmp_path, tensors() | {name: np.zeros((4, 32), np.float32)}, f"does not have, the first is {name}")

    def test_scales_of_activations_are_known_and_ignored(self, tmp_path: Path) -> None:
        held = tensors()
        for name in ("k_scale", "v_scale", "k_proj.k_scale", "v_proj.v_scale"):
            held[f"{fn.ROOT}layers.2.self_attn.{name}"] = np.ones((), np.float32)
        np.testing.assert_array_equal(logits(tmp_path / "a", held), logits(tmp_path / "b", tensors()))


class TestHash:
    @pytest.mark.parametrize("name", ["layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"])
    def test_stored_constants_that_differ_in_one_number(self, tmp_path: Path, name: str) -> None:
        held = tensors()
        whole_name = f"{fn.TABLE.removesuffix('.ngram_embedding')}.{name}"
        held[whole_name] = held[whole_name].copy()
        held[whole_name][-1] += 2
        refuse(tmp_path, held, f"{name} holds .* n-grams would be looked up in the wrong rows")

    @pytest.mark.parametrize(
        "change", [{"seed": 7}, {"vocab_size": 127}, {"heads_per_ngram": 4}, {"ngram_vocab_size_base": 60}]
    )
    def test_a_configuration_of_another_hash(self, tmp_path: Path, change: dict[str, int]) -> None:
        held = tensors()
        if "vocab_size" in change:
            held = {n: v[:127] if n.endswith(("embed_tokens.weight", "lm_head.weight")) else v for n, v in held.items()}
        refuse(tmp_path, held, "layer_multipliers|ngram_heads_vocab_sizes", fn.config(**change))

    def test_several_end_tokens_of_the_whole_model_do_not_choose_the_boundary(self, tmp_path: Path) -> None:
        """A generation's first end token is another than the one that cuts n-grams."""
        settings = fn.config(eos_token_id=None)
        refuse(tmp_path, tensors(), "`eos_token_id` is missing", settings | {"eos_token_id": [2, 43]})
        one = settings | {"eos_token_id": 43}
        np.testing.assert_array_equal(
            whole(load_model(opened(tmp_path / "one", tensors(), one), mx.float32), IDS), logits(tmp_path, tensors())
        )


class TestTable:
    def stored(self, kind: str) -> fn.Tensors:
        return fn.TABLES[kind](tensors(), tensors())[0]

    def test_eight_bits_without_their_factor(self, tmp_path: Path) -> None:
        held = self.stored("fp8")
        del held[f"{fn.TABLE}.weight_scale"]
        refuse(tmp_path, held, "without that factor every answer would be wrong")

    def test_the_factor_is_applied(self, tmp_path: Path) -> None:
        held = self.stored("fp8")
        once = logits(tmp_path / "a", held)
        held[f"{fn.TABLE}.weight_scale"] = held[f"{fn.TABLE}.weight_scale"] * 2
        assert np.abs(logits(tmp_path / "b", held) - once).max() > 1e-2

    def test_eight_bits_with_a_factor_for_each_shard(self, tmp_path: Path) -> None:
        held, meant = self.stored("fp8"), tensors()
        scale = held.pop(f"{fn.TABLE}.weight_scale")
        for i in range(4):
            name = f"{fn.TABLE}.shard_{i}.weight"
            held[f"{name}_scale"] = scale * 2**i
            meant[name] = held[name].astype(np.float32) * np.float32(scale[0] * 2**i)
        np.testing.assert_array_equal(logits(tmp_path / "a", held), logits(tmp_path / "b", meant))
        del held[f"{fn.TABLE}.shard_1.weight_scale"]
        refuse(tmp_path / "c", held, "factors for 3 of its 4 shards")

    @pytest.mark.parametrize("shard", [0, 3])
    def test_four_bits_with_scales_missing_for_one_shard(self, tmp_path: Path, shard: int) -> None:
        held = self.stored("nvfp4 per shard")
        del held[f"{fn.TABLE}.shard_{shard}.weight_scale"]
        refuse(tmp_path, held, r"shard_\d\.weight is U8 .*, but the table's rows|stored as U8")

    def test_four_bits_without_any_factor_count_as_one_and_say_so(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        held = self.stored("nvfp4 of one scale")
        held[f"{fn.TABLE}.weight_scale_2"] = np.float32(1).reshape(())
        one = logits(tmp_path / "a", held)
        del held[f"{fn.TABLE}.weight_scale_2"]
        with caplog.at_level(logging.INFO):
            np.testing.assert_array_equal(logits(tmp_path / "b", held), one)
        assert "has no factor beside its scales: it is taken as 1" in caplog.text

    @pytest.mark.parametrize("name", ["weight_scale", "weight_scale_2", "weight.global_scale"])
    def test_plain_numbers_with_a_factor(self, tmp_path: Path, name: str) -> None:
        held = self.stored("bf16") | {f"{fn.TABLE}.{name}": np.full(1, 0.5, np.float32)}
        refuse(tmp_path, held, "stored as BF16, plain numbers, and yet has a factor")

    def test_rows_that_are_not_those_that_are_addressed(self, tmp_path: Path) -> None:
        held = tensors()
        held[f"{fn.TABLE}.shard_3.weight"] = held[f"{fn.TABLE}.shard_3.weight"][:-1]
        refuse(tmp_path, held, "hold 295 rows, but 296 are addressed")


class TestExperts:
    def test_one_without_the_factor_that_others_have(self, tmp_path: Path) -> None:
        held, _ = fn.nvfp4_experts(tensors())
        del held[f"{EXPERTS}.2.down_proj.weight_scale_2"]
        refuse(tmp_path, held, r"experts\.\*\.down_proj\.weight differ in format")

    def test_one_in_eight_bits_without_scales(self, tmp_path: Path) -> None:
        held, _ = fn.fp8_experts(tensors())
        del held[f"{EXPERTS}.2.up_proj.weight_scale_inv"]
        refuse(tmp_path, held, r"experts\.2\.up_proj\.weight is stored as F8_E4M3 and has no scales")

    @pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
    @pytest.mark.parametrize("factor", [4.0, 0.25])
    def test_gate_and_up_of_different_factors_keep_them(self, tmp_path: Path, dtype: mx.Dtype, factor: float) -> None:
        """A gate's factor is inside the activation, so that a bank with one factor for both would be wrong."""
        stored, meant = fn.nvfp4_experts(tensors())
        name = f"{EXPERTS}.1.gate_proj"
        stored[f"{name}.weight_scale_2"] = stored[f"{name}.weight_scale_2"] * np.float32(factor)
        meant[f"{name}.weight"] = meant[f"{name}.weight"] * factor
        found, expected = logits(tmp_path / "a", stored, dtype), logits(tmp_path / "b", meant)
        if dtype == mx.float32:
            np.testing.assert_allclose(found, expected, atol=5e-4)
        else:
            assert np.sqrt(np.mean((found - expected) ** 2)) < 0.05 * np.sqrt(np.mean(expected**2))

    @pytest.mark.parametrize("shape", [(4,), (4, 1, 1), (), (1,)])
    def test_stacked_banks_take_a_factor_for_each_expert_or_for_all(
        self, tmp_path: Path, shape: tuple[int, ...]
    ) -> None:
        plain = fn.packed_experts(tensors())
        held, meant = dict(plain), dict(plain)
        factors = np.array([0.5, 2, 8, 0.125], np.float32) / 64
        if np.prod(shape) != 4:
            factors[:] = 0.25
        for name in [n for n in plain if ".experts." in n]:
            codes, scales, decoded = zip(
                *(fn.nvfp4(matrix, float(f)) for matrix, f in zip(plain[name], factors, strict=True)), strict=True
            )
            held[name] = np.stack(codes).view(np.uint32)
            held[f"{name}.scale"] = np.stack(scales).view(np.uint8)
            held[f"{name}.global_scale"] = factors.reshape(shape) if np.prod(shape) == 4 else factors[:1].reshape(shape)
            meant[name] = np.stack(decoded)
        np.testing.assert_allclose(logits(tmp_path / "a", held), logits(tmp_path / "b", meant), atol=5e-4)

    def test_a_stack_with_factors_for_fewer_experts(self, tmp_path: Path) -> None:
        plain = fn.packed_experts(tensors())
        name = next(n for n in plain if n.endswith("experts.down_proj"))
        codes, scales, _ = zip(*(fn.nvfp4(matrix, 0.01) for matrix in plain[name]), strict=True)
        held = plain | {name: np.stack(codes).view(np.uint32), f"{name}.scale": np.stack(scales).view(np.uint8)}
        held[f"{name}.global_scale"] = np.full(3, 0.01, np.float32)
        refuse(tmp_path, held, r"global scale F32 of shape \[3\], expected one number or 4")

    def test_a_router_of_another_number_of_experts(self, tmp_path: Path) -> None:
        held = tensors()
        name = f"{fn.ROOT}layers.1.mlp.gate.weight"
        held[name] = held[name][:3]
        refuse(tmp_path, held, r"mlp\.gate\.weight has shape \[3, 32\], but the configuration says \[4, 32\]")

    def test_more_experts_than_the_router_knows(self, tmp_path: Path) -> None:
        held = tensors()
        for name in [n for n in held if ".mlp.gate.weight" in n]:
            held[name] = held[name][:3]
        refuse(tmp_path, held, r"does not have, the first is .*experts\.3\.", fn.config(num_experts=3))


class TestDialect:
    def test_it_is_decided_once_and_said(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO):
            load_model(opened(tmp_path, tensors()), mx.float32)
        said = [record.getMessage() for record in caplog.records if "norm weights are stored" in record.getMessage()]
        assert said == [
            f"norm weights are stored around 0 (by the layout of {fn.ROOT}layers.0.linear_attn.conv1d.weight)"
        ]

    @pytest.mark.parametrize("name", ["layers.1.linear_attn", "layers.1.ple"])
    def test_kernels_of_two_layouts(self, tmp_path: Path, name: str) -> None:
        held = tensors()
        kernel = f"{fn.ROOT}{name}.conv1d.weight"
        held[kernel] = np.ascontiguousarray(held[kernel].swapaxes(1, 2))
        refuse(tmp_path, held, f"{name}.conv1d.weight .*nothing tells how the gains of norms are stored")


class TestLayers:
    @pytest.mark.parametrize(
        "kinds", [["linear_attention"] * 3, ["full_attention", "linear_attention", "full_attention"]]
    )
    def test_kinds_that_are_not_those_of_the_file(self, tmp_path: Path, kinds: list[str]) -> None:
        refuse(tmp_path, tensors(), "missing|does not have", fn.config(layer_types=kinds))

    def test_fewer_kinds_than_layers(self, tmp_path: Path) -> None:
        refuse(tmp_path, tensors(), "`layer_types` should be a list of 4", fn.config(num_hidden_layers=4))

    def test_fewer_layers_than_the_file_has(self, tmp_path: Path) -> None:
        changes = {"num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2}
        refuse(tmp_path, tensors(), r"does not have, the first is .*layers\.2\.", fn.config(**changes))

    @pytest.mark.parametrize("spelling", ["full_attention", "indexed_attention"])
    def test_both_spellings_of_attention_are_one(self, tmp_path: Path, spelling: str) -> None:
        kinds = ["linear_attention", "linear_attention", spelling]
        model = load_model(opened(tmp_path, tensors(), fn.config(layer_types=kinds)), mx.float32)
        np.testing.assert_array_equal(whole(model, IDS), logits(tmp_path / "b", tensors()))


def test_a_head_for_drafts_may_be_there_or_not(tmp_path: Path) -> None:
    with_head = fn.with_other_parts(tensors())
    without = {name: value for name, value in with_head.items() if not name.startswith(("mtp.", "model.visual."))}
    head = {name: value for name, value in with_head.items() if not name.startswith("model.visual.")}
    assert len(head) > len(without)
    np.testing.assert_array_equal(logits(tmp_path / "a", head), logits(tmp_path / "b", without))


def test_a_factor_of_every_kind_decodes_as_its_scalar_reference_says() -> None:
    """The helper that makes these files against the formats' tables, so that both cannot be wrong alike."""
    values = np.random.default_rng(0).normal(size=(4, 32)).astype(np.float32)
    packed, scales, meant = fn.nvfp4(values, 0.01)
    low, high = packed & 15, packed >> 4
    codes = np.stack([low, high], axis=-1).reshape(4, 32)
    by_hand = [
        [E2M1[codes[r, c]] * E4M3[scales.view(np.uint8)[r, c // 16]] * np.float32(0.01) for c in range(32)]
        for r in range(4)
    ]
    np.testing.assert_allclose(meant, np.array(by_hand, np.float32), rtol=1e-6)
    assert np.abs(meant - values).max() < 0.6


def test_a_loaded_table_and_one_in_its_files_are_both_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, _ = fn.TABLES["nvfp4 per shard"](tensors(), tensors())
    checkpoint = opened(tmp_path, stored)
    model: Any = load_model(checkpoint, mx.float32)
    assert model.layers[1].ngrams.table.files is not None
    with pytest.raises(CheckpointError, match=r"shard_0\.weight is kept on the host and cannot be loaded as well"):
        checkpoint.weight(f"{fn.TABLE}.shard_0.weight")
    expected = whole(model, IDS)
    monkeypatch.setenv("ARRIERO_RESIDENT_TABLES", "1")
    resident: Any = load_model(Checkpoint.open(FolderSource(str(tmp_path))), mx.float32)
    assert resident.layers[1].ngrams.table.files is None
    np.testing.assert_array_equal(whole(resident, IDS), expected)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen4_exp"
