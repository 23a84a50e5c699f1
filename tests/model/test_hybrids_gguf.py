"""Nemotron-H's and gpt-oss's GGUF files give the reference's logits."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from arriero.errors import CheckpointError
from arriero.model.architectures import load_model
from arriero.model.checkpoint import Checkpoint
from arriero.model.quantization import Quantization
from arriero.source import GGUFSource
from tests.helpers.forward import whole
from tests.helpers.gguf_files import encode, gguf_bytes
from tests.helpers.hybrid_gguf import (
    library_metadata,
    library_tensors,
    nemotron_metadata,
    nemotron_tensors,
    write_gpt_oss,
    write_nemotron,
)
from tests.helpers.memory_checkpoint import MemoryCheckpoint

GOLDENS = Path(__file__).parent / "goldens"
NEMOTRON = [
    ("nemotron_h", "nemotron_h"),
    ("nemotron_h_moe", "nemotron_h_moe"),
    ("nemotron_h_latent", "nemotron_h_moe"),
]


def opened(path: Path) -> Checkpoint:
    return Checkpoint.open(GGUFSource((str(path),)))


def golden(name: str) -> tuple[list[int], np.ndarray]:
    with np.load(GOLDENS / name / "golden.npz") as file:
        return file["ids"].tolist(), file["logits"]


def expect_logits(checkpoint: Checkpoint, name: str) -> None:
    ids, logits = golden(name)
    np.testing.assert_allclose(whole(load_model(checkpoint, mx.float32), ids), logits, rtol=0, atol=2e-4)


@pytest.mark.parametrize(("name", "architecture"), NEMOTRON)
def test_nemotron_h(name: str, architecture: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_nemotron(tmp_path / "m.gguf", MemoryCheckpoint.golden(GOLDENS / name), architecture)
    expect_logits(opened(tmp_path / "m.gguf"), name)
    assert not caplog.records


def expect_the_folder(path: Path, folder: MemoryCheckpoint) -> None:
    ids, _ = golden("gpt_oss")
    found, expected = (whole(load_model(c, mx.float32), ids) for c in (opened(path), folder.typed()))
    np.testing.assert_array_equal(found, expected)


def test_gpt_oss_with_packed_experts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_gpt_oss(tmp_path / "m.gguf", MemoryCheckpoint.golden(GOLDENS / "gpt_oss_mxfp4"))
    checkpoint = opened(tmp_path / "m.gguf")
    expect_logits(checkpoint, "gpt_oss_mxfp4")
    assert not caplog.records
    down = checkpoint.weight("model.layers.0.mlp.experts.down_proj.weight")
    assert down.quantization == Quantization("mxfp4", 4, 32)


def test_gpt_oss_of_the_library_gives_the_bits_of_the_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its bounds of YaRN are those of every published model, which no key says."""
    folder = MemoryCheckpoint.golden(GOLDENS / "gpt_oss_mxfp4")
    rope = {k: v for k, v in folder.config["rope_parameters"].items() if not k.startswith("beta")}
    folder = folder.copy(rope_parameters=rope)
    path = tmp_path / "m.gguf"
    ends = {"tokenizer.ggml.eos_token_id": 3, "tokenizer.ggml.eos_token_ids": [3, 5, 7]}
    path.write_bytes(gguf_bytes(library_metadata(folder.config) | ends, library_tensors(folder)))
    checkpoint = opened(path)
    assert checkpoint.generation_config["eos_token_id"] == [3, 5, 7]
    ids, _ = golden("gpt_oss_mxfp4")
    found, expected = (whole(load_model(c, mx.float32), ids) for c in (checkpoint, folder.typed()))
    np.testing.assert_array_equal(found, expected)
    assert not caplog.records


def gpt_oss() -> MemoryCheckpoint:
    """The golden with the limit of every published model, which files don't say."""
    return MemoryCheckpoint.golden(GOLDENS / "gpt_oss").copy(swiglu_limit=7.0)


def test_gpt_oss_with_dense_experts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_gpt_oss(tmp_path / "m.gguf", gpt_oss())
    expect_the_folder(tmp_path / "m.gguf", gpt_oss())
    assert not caplog.records


def test_nemotron_h_knows_its_layers_by_two_lists(tmp_path: Path) -> None:
    write_nemotron(tmp_path / "m.gguf", MemoryCheckpoint.golden(GOLDENS / "nemotron_h_moe"), "nemotron_h_moe")
    config = opened(tmp_path / "m.gguf").config
    assert config["layers_block_type"] == ["mamba", "moe", "attention", "moe"]
    assert (config["use_conv_bias"], config["use_bias"], config["mlp_bias"]) == (True, False, False)


def test_a_rotary_dimension_in_nemotron_h_s_file_means_nothing(tmp_path: Path) -> None:
    more = {"rope.dimension_count": 8, "rope.freq_base": 10000.0, "rope.scaling.type": "linear"}
    folder = MemoryCheckpoint.golden(GOLDENS / "nemotron_h")
    write_nemotron(tmp_path / "m.gguf", folder, "nemotron_h", more | {"rope.scaling.factor": 4.0})
    expect_logits(opened(tmp_path / "m.gguf"), "nemotron_h")


def test_layers_of_the_head_for_drafts_are_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = MemoryCheckpoint.golden(GOLDENS / "nemotron_h_moe")
    keys = nemotron_metadata(folder.config, "nemotron_h_moe")
    keys |= {
        "nemotron_h_moe.block_count": 5,
        "nemotron_h_moe.nextn_predict_layers": 1,
        "nemotron_h_moe.attention.head_count_kv": [0, 0, 2, 0, 2],
        "nemotron_h_moe.feed_forward_length": [0, 24, 0, 24, 24],
    }
    tensors = {name: encode("F32", values) for name, values in nemotron_tensors(folder).items()}
    tensors |= {f"blk.4.{name}.weight": encode("F32", np.ones((1, 32))) for name in ("nextn.enorm", "attn_q")}
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(keys, tensors))
    with caplog.at_level(logging.INFO):
        expect_logits(opened(tmp_path / "m.gguf"), "nemotron_h_moe")
    assert "predicts several tokens is not loaded" in caplog.text
    assert "(2 tensors)" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"ssm.time_step_rank": 5}, "5 heads of 72 numbers together do not fit"),
        ({"nextn_predict_layers": 4}, "4 of them for drafts"),
        ({"attention.head_count_kv": 2}, "attention.head_count_kv has the unusable value"),
        ({"feed_forward_length": [96]}, "feed_forward_length has the unusable value"),
        ({"attention.head_count_kv": [0, 0, 2, 4]}, "attention.head_count_kv differs between layers"),
        ({"ssm.group_count": 0}, "ssm.group_count is missing or zero"),
    ],
)
def test_nemotron_h_s_metadata_that_cannot_be_are_refused_by_key(
    more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_nemotron(tmp_path / "m.gguf", MemoryCheckpoint.golden(GOLDENS / "nemotron_h"), "nemotron_h", more)
    with pytest.raises(CheckpointError, match=message):
        opened(tmp_path / "m.gguf")


def test_gpt_oss_s_windows_may_be_listed(tmp_path: Path) -> None:
    write_gpt_oss(tmp_path / "m.gguf", gpt_oss(), {"attention.sliding_window_pattern": [False, True, True]})
    listed = ["full_attention", "sliding_attention", "sliding_attention"]
    expect_the_folder(tmp_path / "m.gguf", gpt_oss().copy(layer_types=listed))
    write_gpt_oss(tmp_path / "n.gguf", gpt_oss(), {"attention.sliding_window_pattern": [True]})
    with pytest.raises(CheckpointError, match="sliding_window_pattern has the unusable value"):
        opened(tmp_path / "n.gguf")


def test_gpt_oss_without_scaling_has_none(tmp_path: Path) -> None:
    write_gpt_oss(tmp_path / "m.gguf", gpt_oss(), {"rope.scaling.type": "none"})
    plain = {"rope_type": "default", "rope_theta": 5000.0}
    expect_the_folder(tmp_path / "m.gguf", gpt_oss().copy(rope_parameters=plain))
