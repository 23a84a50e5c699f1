"""The same weights as a Hugging Face folder and as a GGUF file are the same model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from arriero.model.architectures import load_model
from arriero.model.checkpoint import Checkpoint
from arriero.model.gguf_names import LAYER_NAMES
from arriero.source import GGUFSource
from tests.helpers.forward import whole
from tests.helpers.gguf_files import encode, gguf_bytes, interleave_rotary
from tests.helpers.memory_checkpoint import MemoryCheckpoint

GOLDENS = Path(__file__).parent / "goldens"

SHARED_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # golden: (GGUF architecture, changes of the folder's configuration, further metadata)
    "llama": ("llama", {}, {}),
    "llama_linear_biases": ("llama", {}, {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
    "mistral_window": ("llama", {}, {}),
    "qwen2": ("qwen2", {}, {}),
    "qwen3": ("qwen3", {}, {}),
    "qwen3_moe": ("qwen3moe", {}, {}),
    # GGUF files imply the softmax scale, and list which layers slide.
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 16}, {}),
    "gemma3": (
        "gemma3",
        {"query_pre_attn_scalar": 16},
        {
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
            "rope.freq_base_swa": 100.0,
            "attention.sliding_window_pattern": [True, True, False, True],
        },
    ),
}


def numbers(checkpoint: MemoryCheckpoint) -> dict[str, np.ndarray]:
    """Float32 tensors by Hugging Face name, experts stacked."""
    tensors: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, value in checkpoint.tensors.items():
        assert isinstance(value, mx.array)
        array = np.array(value.astype(mx.float32))
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+\.weight)", name)
        if match:
            experts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = array
        else:
            tensors[name] = array
    return tensors | {name: np.stack([parts[i] for i in range(len(parts))]) for name, parts in experts.items()}


def write(path: Path, checkpoint: MemoryCheckpoint, architecture: str, more: dict[str, Any]) -> None:
    """The checkpoint as a GGUF file of float32 numbers, by that format's conventions."""
    config = checkpoint.config
    theta = config["rope_parameters"].get("full_attention", config["rope_parameters"])["rope_theta"]
    keys: dict[str, Any] = {key: config[field] for key, field in SHARED_KEYS.items() if config.get(field) is not None}
    keys |= {"rope.freq_base": float(theta), **more}
    metadata = {"general.architecture": architecture} | {f"{architecture}.{key}": v for key, v in keys.items()}
    modules = {there: here for here, there in LAYER_NAMES[architecture].items()}
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    tensors = {}
    for name, array in numbers(checkpoint).items():
        module, _, kind = name.rpartition(".")
        if architecture == "llama" and re.search(r"[qk]_proj$", module):
            heads = config["num_attention_heads" if "q_proj" in module else "num_key_value_heads"]
            array = interleave_rotary(array, heads)
        if architecture.startswith("gemma") and module.endswith("norm"):
            array = array + 1
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", module)
        stored = f"blk.{match[1]}.{modules[match[2]]}" if match else top[module]
        tensors[f"{stored}.{kind}"] = encode("F32", array)
    path.write_bytes(gguf_bytes(metadata, tensors))


@pytest.mark.parametrize("name", CASES)
def test_a_gguf_file_gives_the_bits_of_the_folder(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    architecture, changes, more = CASES[name]
    folder = MemoryCheckpoint.golden(GOLDENS / name).copy(**changes)
    write(tmp_path / "model.gguf", folder, architecture, more)
    opened = Checkpoint.open(GGUFSource((str(tmp_path / "model.gguf"),)))
    with np.load(GOLDENS / name / "golden.npz") as file:
        ids = file["ids"].tolist()
    expected = whole(load_model(folder.typed(), mx.float32), ids)
    found = whole(load_model(opened, mx.float32), ids)
    np.testing.assert_array_equal(found, expected)
    assert not caplog.records
