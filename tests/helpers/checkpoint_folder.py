"""Tiny safetensors folders as Hugging Face and MLX lay them out; weights are random."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from arriero.formats.safetensors import write
from arriero.store.store import Store
from tests.helpers.stored_model import CHATML, byte_tokenizer

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 259,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 258,
    "tie_word_embeddings": True,
}


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """The float32 tensors of `CONFIG`, one of them a norm."""
    rng = np.random.default_rng(seed)
    shapes = {"embed_tokens.weight": (259, 64), "norm.weight": (64,)}
    for name, shape in {"q": (64, 64), "k": (32, 64), "v": (32, 64), "o": (64, 64)}.items():
        shapes[f"layers.0.self_attn.{name}_proj.weight"] = shape
    for name, shape in {"gate": (96, 64), "up": (96, 64), "down": (64, 96)}.items():
        shapes[f"layers.0.mlp.{name}_proj.weight"] = shape
    shapes |= {"layers.0.input_layernorm.weight": (64,), "layers.0.post_attention_layernorm.weight": (64,)}
    return {f"model.{name}": rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}


def write_folder(
    folder: Path,
    shards: Mapping[str, Mapping[str, np.ndarray]] | None = None,
    *,
    config: Mapping[str, Any] | None = None,
    index: bool = False,
    metadata: Mapping[str, str] | None = None,
    template: bool = True,
) -> Path:
    """A folder with config.json, tokenizer files and the shards by file name."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = {"model.safetensors": tensors()} if shards is None else shards
    (folder / "config.json").write_text(json.dumps(CONFIG | dict(config or {})))
    (folder / "tokenizer.json").write_text(byte_tokenizer().to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "generation_config.json").write_text("{}")
    if template:
        (folder / "chat_template.jinja").write_text(CHATML)
    for name, held in shards.items():
        write(folder / name, held, metadata)
    if index:
        weight_map = {tensor: name for name, held in shards.items() for tensor in held}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def packed(values: Mapping[str, np.ndarray], bits: int = 4, group: int = 32) -> dict[str, np.ndarray]:
    """Every matrix with random words, scales and biases of MLX's affine layout in its place."""
    rng = np.random.default_rng(1)
    found: dict[str, np.ndarray] = {}
    for name, value in values.items():
        if value.ndim < 2:
            found[name] = value
            continue
        stem, (rows, columns) = name.removesuffix(".weight"), value.shape
        found[name] = rng.integers(0, 2**32, (rows, columns * bits // 32), dtype=np.uint32)
        found[f"{stem}.scales"] = rng.normal(0, 0.01, (rows, columns // group)).astype(np.float16)
        found[f"{stem}.biases"] = rng.normal(0, 0.01, (rows, columns // group)).astype(np.float16)
    return found


def upload(store: Store, folder: Path) -> dict[str, str]:
    """Put every file of a folder into the store's blobs, as a client does; name → digest."""
    return {path.name: store.blobs.ingest([path.read_bytes()]).digest for path in sorted(folder.iterdir())}


def blob_name(path: Path) -> str:
    """The digest of a file."""
    return "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()
