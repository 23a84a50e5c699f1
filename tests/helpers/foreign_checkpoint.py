"""Tiny random checkpoints of architectures that only mlx-lm has, made with its own networks."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "olmo2": {**COMMON, "architectures": ["Olmo2ForCausalLM"]},
    "phi3": {**COMMON, "architectures": ["Phi3ForCausalLM"]},
    # Windows of eight positions beside whole keys and values.
    "olmo3": {
        **COMMON,
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    # Convolutions, whose states can't go back.
    "lfm2": {
        **COMMON,
        "architectures": ["Lfm2ForCausalLM"],
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 96,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1],
    },
}
"""By `model_type`."""


def config(kind: str, **changes: Any) -> dict[str, Any]:
    return {**CONFIGS[kind], "model_type": kind, **changes}


def network(kind: str, seed: int = 1, **changes: Any) -> Any:
    """mlx-lm's own network with random float32 weights."""
    module = importlib.import_module(f"mlx_lm.models.{kind}")
    made = module.Model(module.ModelArgs.from_dict(config(kind, **changes)))
    key = mx.random.key(seed)
    drawn = []
    for name, array in tree_flatten(made.parameters()):
        key, own = mx.random.split(key)
        noise = mx.random.normal(array.shape, key=own)
        drawn.append((name, 1 + 0.3 * noise if array.ndim == 1 else 1.5 * array.shape[-1] ** -0.5 * noise))
    made.update(tree_unflatten(drawn))
    made.eval()
    return made


def write(folder: Path, kind: str, *, bits: int = 0, **changes: Any) -> tuple[Path, Any]:
    """A folder with `config.json` and one file of tensors, and the network that it was written from.

    `bits` packs every matrix; `changes` are fields of the configuration (None: left out).
    """
    sizes = {name: value for name, value in changes.items() if name in COMMON and value is not None}
    made = network(kind, **sizes)
    values = {name: value for name, value in config(kind, **changes).items() if value is not None}
    if bits:
        nn.quantize(made, group_size=32, bits=bits)
        values["quantization"] = {"group_size": 32, "bits": bits}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(made.parameters())), {"format": "mlx"})
    return folder, made
