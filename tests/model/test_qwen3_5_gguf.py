"""Qwen 3.5's GGUF files: value heads in another order, decay as a number, and layers of a head for drafts."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from arriero.errors import CheckpointError
from arriero.model.architectures import load_model
from arriero.model.checkpoint import Checkpoint
from arriero.model.gguf_names import LAYER_NAMES, PARAMETERS
from arriero.model.gguf_orders import take_columns
from arriero.source import GGUFSource
from tests.helpers.forward import whole
from tests.helpers.gguf_files import Tensor, decoded, encode, gguf_bytes
from tests.helpers.memory_checkpoint import MemoryCheckpoint, dequantize
from tests.model.test_gguf_models import SHARED_KEYS, numbers

GOLDENS = Path(__file__).parent / "goldens"
CASES = [
    ("qwen3_5", "qwen35"),
    ("qwen3_5_tied", "qwen35"),
    ("qwen3_5_moe", "qwen35moe"),
    # The same network in another layout; the golden of Qwen3-Next has a dense layer, which no file can say.
    ("qwen3_5_moe", "qwen3next"),
]
KEYS = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "expert_count": "num_experts",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}


def ids(name: str) -> list[int]:
    with np.load(GOLDENS / name / "golden.npz") as file:
        found: list[int] = file["ids"].tolist()
    return found


def metadata(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    """The configuration as a file of this architecture says it."""
    keys = {key: config[field] for key, field in {**SHARED_KEYS, **KEYS}.items() if config.get(field) is not None}
    rope = config["rope_parameters"]
    keys |= {
        "ssm.inner_size": config["linear_num_value_heads"] * config["linear_value_head_dim"],
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(config["head_dim"] * rope["partial_rotary_factor"]),
        "attention.recurrent_layers": [kind == "linear_attention" for kind in config["layer_types"]],
    }
    return {"general.architecture": architecture} | {f"{architecture}.{key}": v for key, v in keys.items()}


def tiled(values: np.ndarray, axis: int, config: dict[str, Any], before: int = 0) -> np.ndarray:
    """Value heads, neighbours by key head, laid round the key heads; `before` elements stay."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    fixed, moved = np.split(values, [before], axis=axis)
    split = moved.reshape(*moved.shape[:axis], keys, heads // keys, -1, *moved.shape[axis + 1 :])
    return np.concatenate([fixed, split.swapaxes(axis, axis + 1).reshape(moved.shape)], axis=axis)


def stored(name: str, values: np.ndarray, config: dict[str, Any], architecture: str) -> tuple[str, np.ndarray]:
    """Name and numbers as the file has them."""
    modules = {there: here for here, there in LAYER_NAMES[architecture].items()}
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if name.endswith("norm.weight") and "linear_attn" not in name:
        values = values + 1
    if name.endswith("A_log"):
        values = -np.exp(values)
    if "conv1d" in name:
        values = values[:, 0]
    if "shared_expert_gate" in name:
        values = values[0]
    if architecture != "qwen3next" and "linear_attn" in name:
        keys = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
        if re.search(r"in_proj_[zab]|A_log|dt_bias", name):
            values = tiled(values, 0, config)
        elif re.search("in_proj_qkv|conv1d", name):
            values = tiled(values, 0, config, keys)
        elif "out_proj" in name:
            values = tiled(values, 1, config)
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
    if not layer:
        return f"{top[name.removesuffix('.weight')]}.weight", values
    suffixless = {there: here for here, there in PARAMETERS.items()}
    if layer[2] in suffixless:
        suffix = ".bias" if layer[2].endswith("bias") else ""
        return f"blk.{layer[1]}.{suffixless[layer[2]]}{suffix}", values
    return f"blk.{layer[1]}.{modules[layer[2].removesuffix('.weight')]}.weight", values


def fused(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> dict[str, np.ndarray]:
    """b and a of each key head side by side, as Qwen3-Next's files have them."""
    keys = config["linear_num_key_heads"]
    found = dict(tensors)
    for name in [name for name in tensors if name.endswith("in_proj_b.weight")]:
        b, a = (found.pop(n) for n in (name, name.replace("_b.", "_a.")))
        both = [part.reshape(keys, -1, part.shape[-1]) for part in (b, a)]
        found[name.replace("_b.", "_ba.")] = np.concatenate(both, axis=1).reshape(-1, b.shape[-1])
    return found


def file_tensors(folder: MemoryCheckpoint, architecture: str) -> dict[str, np.ndarray]:
    """Every tensor by the file's name."""
    tensors = numbers(folder)
    if architecture == "qwen3next":
        tensors = fused(tensors, folder.config)
    return dict(stored(name, values, folder.config, architecture) for name, values in tensors.items())


def write(
    path: Path,
    name: str,
    architecture: str = "qwen35",
    *,
    more: dict[str, Any] | None = None,
    extra: dict[str, Tensor] | None = None,
    kind: str = "F32",
) -> Checkpoint:
    """A golden as a GGUF file, its output projections of delta nets as `kind`."""
    folder = MemoryCheckpoint.golden(GOLDENS / name)
    changed = {f"{architecture}.{key}": value for key, value in (more or {}).items()}
    tensors = {
        key: encode(kind if "ssm_out" in key else "F32", values)
        for key, values in file_tensors(folder, architecture).items()
    }
    path.write_bytes(gguf_bytes(metadata(folder.config, architecture) | changed, tensors | (extra or {})))
    return Checkpoint.open(GGUFSource((str(path),)))


@pytest.mark.parametrize(("name", "architecture"), CASES)
def test_a_gguf_file_gives_the_logits_of_the_folder(
    name: str, architecture: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    opened = write(tmp_path / "model.gguf", name, architecture)
    with np.load(GOLDENS / name / "golden.npz") as file:
        expected = file["logits"]
    np.testing.assert_allclose(whole(load_model(opened, mx.float32), ids(name)), expected, rtol=0, atol=2e-4)
    assert not caplog.records


def test_a_file_may_say_its_layers_by_their_key_heads_and_hold_the_vision_tower(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another converter's spelling: counts of key heads by layer, a flag for the order of heads, no suffix of dt."""
    folder = MemoryCheckpoint.golden(GOLDENS / "qwen3_5")
    keys = metadata(folder.config, "qwen35")
    del keys["qwen35.attention.recurrent_layers"]
    keys |= {"qwen35.attention.head_count_kv": [0, 0, 2], "qwen35.ssm.v_head_reordered": True}
    tensors = {k.removesuffix(".bias"): encode("F32", v) for k, v in file_tensors(folder, "qwen35").items()}
    tensors["v.blk.0.attn_q.weight"] = encode("F32", np.ones((4, 32), np.float32))
    (tmp_path / "model.gguf").write_bytes(gguf_bytes(keys, tensors))
    opened = Checkpoint.open(GGUFSource((str(tmp_path / "model.gguf"),)))
    with caplog.at_level(logging.INFO):
        found = whole(load_model(opened, mx.float32), ids("qwen3_5"))
    with np.load(GOLDENS / "qwen3_5" / "golden.npz") as file:
        np.testing.assert_allclose(found, file["logits"], rtol=0, atol=2e-4)
    assert "images are refused (1 tensors)" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_heads_that_a_file_says_are_neighbours_stay_where_they_are(tmp_path: Path) -> None:
    config = MemoryCheckpoint.golden(GOLDENS / "qwen3_5_moe").config
    tensors = file_tensors(MemoryCheckpoint.golden(GOLDENS / "qwen3_5_moe"), "qwen3next")
    keys = metadata(config, "qwen35moe") | {"qwen35moe.ssm.v_head_reordered": False}
    (tmp_path / "model.gguf").write_bytes(gguf_bytes(keys, {k: encode("F32", v) for k, v in tensors.items()}))
    opened = Checkpoint.open(GGUFSource((str(tmp_path / "model.gguf"),)))
    with np.load(GOLDENS / "qwen3_5_moe" / "golden.npz") as file:
        expected = file["logits"]
    np.testing.assert_allclose(whole(load_model(opened, mx.float32), ids("qwen3_5_moe")), expected, rtol=0, atol=2e-4)


def test_gate_and_up_of_the_experts_may_be_one_tensor(tmp_path: Path) -> None:
    config = MemoryCheckpoint.golden(GOLDENS / "qwen3_5_moe").config
    tensors = file_tensors(MemoryCheckpoint.golden(GOLDENS / "qwen3_5_moe"), "qwen35moe")
    for layer in range(2):
        gate, up = (tensors.pop(f"blk.{layer}.ffn_{part}_exps.weight") for part in ("gate", "up"))
        tensors[f"blk.{layer}.ffn_gate_up_exps.weight"] = np.concatenate([gate, up], axis=1)
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(metadata(config, "qwen35moe"), {k: encode("F32", v) for k, v in tensors.items()}))
    found = whole(load_model(Checkpoint.open(GGUFSource((str(path),))), mx.float32), ids("qwen3_5_moe"))
    with np.load(GOLDENS / "qwen3_5_moe" / "golden.npz") as file:
        np.testing.assert_allclose(found, file["logits"], rtol=0, atol=2e-4)


def test_layers_of_the_head_for_drafts_are_left_out_with_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ones = encode("F32", np.ones((48,), np.float32))
    extra = {"blk.3.attn_norm.weight": ones, "blk.3.nextn.enorm.weight": ones}
    more = {"block_count": 4, "nextn_predict_layers": 1}
    opened = write(tmp_path / "model.gguf", "qwen3_5", more=more, extra=extra)
    with caplog.at_level(logging.INFO):
        model = load_model(opened, mx.float32)
    assert model.facts.layers == 3
    assert "predicts several tokens is not loaded: of GGUF files it is not in this version (2 tensors)" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_packed_columns_move_with_their_heads(tmp_path: Path) -> None:
    """24 numbers a head fit no group of 32, so the file's heads are made wider than the golden's here."""
    rng = np.random.default_rng(0)
    config = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    tensor = encode("Q8_0", tiled(rng.normal(size=(48, 4 * 32)).astype(np.float32), 1, config))
    folder = MemoryCheckpoint.golden(GOLDENS / "qwen3_5")
    tensors = {key: encode("F32", values) for key, values in file_tensors(folder, "qwen35").items()}
    path = tmp_path / "model.gguf"
    path.write_bytes(
        gguf_bytes(
            metadata(folder.config, "qwen35") | {"qwen35.ssm.inner_size": 128},
            {key: value for key, value in tensors.items() if not re.search("ssm|attn_gate|attn_qkv", key)}
            | {"blk.0.ssm_out.weight": tensor},
        )
    )
    opened = Checkpoint.open(GGUFSource((str(path),)))
    weight = opened.weight("model.layers.0.linear_attn.out_proj.weight")
    values = decoded(tensor).reshape(48, 2, 2, 32).swapaxes(1, 2).reshape(48, 128)
    np.testing.assert_allclose(np.array(dequantize(weight)), values, atol=1e-6)


def test_heads_that_cut_through_packed_groups_are_refused(tmp_path: Path) -> None:
    opened = write(tmp_path / "model.gguf", "qwen3_5", kind="Q8_0")
    with pytest.raises(CheckpointError, match=r"ssm_out\.weight is stored as Q8_0, but its columns move in runs"):
        load_model(opened, mx.float32)


def test_columns_move_in_whole_units() -> None:
    array = np.arange(16).reshape(2, 8)
    order = np.array([4, 5, 6, 7, 0, 1, 2, 3])
    np.testing.assert_array_equal(take_columns(array, order, 4), array[:, order])
    np.testing.assert_array_equal(take_columns(array[:, :4], order, 4), array[:, [2, 3, 0, 1]])
    for wrong in (order[::-1], np.array([2, 3, 4, 5, 6, 7, 0, 1]), order[:6]):
        with pytest.raises(CheckpointError, match="no multiples of the 4 numbers"):
            take_columns(array, wrong, 4)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"ssm.time_step_rank": 5}, "value heads of"),
        ({"ssm.group_count": 3}, "3 key heads do not fit"),
        ({"nextn_predict_layers": 3}, "3 of them for drafts"),
        ({"attention.recurrent_layers": [True]}, "attention.recurrent_layers has the unusable value"),
        ({"ssm.state_size": 0}, "ssm.state_size is missing or zero"),
        ({"ssm.inner_size": 192}, "numbers for 4 value heads of 48"),
    ],
)
def test_metadata_that_cannot_be_are_refused_by_key(more: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_model(write(tmp_path / "model.gguf", "qwen3_5", more=more), mx.float32)


def test_layers_follow_the_interval_of_the_file(tmp_path: Path) -> None:
    named = write(tmp_path / "a.gguf", "qwen3_5")
    assert named.config["layer_types"] == ["linear_attention", "linear_attention", "full_attention"]
    folder = MemoryCheckpoint.golden(GOLDENS / "qwen3_5")
    keys = metadata(folder.config, "qwen35") | {"qwen35.full_attention_interval": 3}
    del keys["qwen35.attention.recurrent_layers"]
    tensors = {key: encode("F32", values) for key, values in file_tensors(folder, "qwen35").items()}
    (tmp_path / "b.gguf").write_bytes(gguf_bytes(keys, tensors))
    counted = Checkpoint.open(GGUFSource((str(tmp_path / "b.gguf"),)))
    found, expected = (whole(load_model(c, mx.float32), ids("qwen3_5")) for c in (counted, named))
    np.testing.assert_array_equal(found, expected)
