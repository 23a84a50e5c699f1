"""Writes a GGUF file as a Hugging Face folder of plain numbers, for measuring what a new quantisation of it costs.

Development only. Matrices become bfloat16, vectors stay float32, the tokenizer is the file's own.

    python -m tools.export_folder MODEL.gguf FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np

from arriero.chat.files import TextFiles
from arriero.chat.vocabulary import tokenizer_from_gguf
from arriero.formats.safetensors import write
from arriero.model.checkpoint import Checkpoint
from arriero.source import GGUFSource


def numbers(checkpoint: Checkpoint, name: str) -> np.ndarray:
    """A tensor as Hugging Face stores it: bfloat16 matrices, float32 vectors."""
    weight = checkpoint.weight(name)
    how = weight.quantization
    if how is None:
        values = np.array(weight.data.astype(mx.float32))
    else:
        plain = mx.dequantize(
            weight.data,
            weight.scales,
            weight.biases,
            group_size=how.group_size,
            bits=how.bits,
            mode=how.mode,
            dtype=mx.float32,
        )
        values = np.array(plain)
    if values.ndim >= 2:
        return values.astype(ml_dtypes.bfloat16)
    # GGUF files hold Gemma's gains with their 1, folders without it.
    bakes = str(checkpoint.config.get("model_type", "")).startswith("gemma") and name.endswith("norm.weight")
    return values - np.float32(1) if bakes else values


def tokenizer_config(metadata: Any) -> dict[str, Any]:
    """What `tokenizer_config.json` says of special tokens and the template."""
    tokens = metadata["tokenizer.ggml.tokens"]
    found: dict[str, Any] = {"add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", False))}
    for ours, theirs in (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding")):
        index = metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        if index is not None:
            found[ours] = tokens[index]
    template = metadata.get("tokenizer.chat_template")
    return found | ({"chat_template": template} if template else {})


def export(model: Path, folder: Path) -> Path:
    """Write `config.json`, `model.safetensors` and the tokenizer; the folder."""
    source = GGUFSource((str(model),))
    checkpoint = Checkpoint.open(source)
    metadata = TextFiles.open(source).metadata
    folder.mkdir(parents=True, exist_ok=True)
    config = checkpoint.config | {"torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config, indent=2), "utf-8")
    (folder / "tokenizer.json").write_text(tokenizer_from_gguf(metadata).to_str(), "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(metadata), indent=2), "utf-8")
    write(folder / "model.safetensors", {name: numbers(checkpoint, name) for name in checkpoint.names()})
    return folder


if __name__ == "__main__":
    export(Path(sys.argv[1]), Path(sys.argv[2]))
