"""Tensor names of GGUF files ⇄ Hugging Face names, and the row orders that differ."""

from __future__ import annotations

import re

import numpy as np

from arriero.errors import CheckpointError
from arriero.formats.mapped import REPAIR

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}

_LLAMA = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MOE = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

LAYER_NAMES: dict[str, dict[str, str]] = {
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "qwen3moe": _LLAMA | _MOE,
    "gemma2": _LLAMA | _GEMMA,
    "gemma3": _LLAMA | _GEMMA,
}
"""Per GGUF architecture: a layer's module → the Hugging Face module."""

CONSUMED = re.compile(r"^(rope_freqs|blk\.\d+\.(rope_freqs|attn_rot_embd))\.weight$")
"""Rotary tables: read into the configuration, or made anew by every architecture."""

_LAYER = re.compile(r"^blk\.(\d+)\.([a-z0-9_]+)\.(weight|bias)$")
_ROTARY_PAIRS = {"attn_q", "attn_k"}


def hugging_face_name(architecture: str, name: str) -> str:
    """The Hugging Face name of a tensor; names that we do not know stay as they are."""
    modules = LAYER_NAMES.get(architecture)
    if modules is None:
        return name
    module, _, kind = name.rpartition(".")
    if module in _TOP and kind in ("weight", "bias"):
        return f"{_TOP[module]}.{kind}"
    match = _LAYER.match(name)
    if match and match[2] in modules:
        return f"model.layers.{match[1]}.{modules[match[2]]}.{match[3]}"
    return name


def row_order(architecture: str, name: str, rows: int, heads: int, kv_heads: int) -> np.ndarray | None:
    """The rows of a GGUF tensor in Hugging Face's order, or None where both agree.

    Files of the `llama` architecture hold q and k with the two halves of each rotary pair side by side; we want the
    first halves of a head before the second halves. Raises CheckpointError for rows that are no whole heads.
    """
    match = _LAYER.match(name)
    if architecture != "llama" or not match or match[2] not in _ROTARY_PAIRS:
        return None
    count = heads if match[2] == "attn_q" else kv_heads
    if count <= 0 or rows % (2 * count):
        raise CheckpointError(f"tensor {name} has {rows} rows for {count} heads; {REPAIR}")
    return np.arange(rows).reshape(count, rows // count // 2, 2).swapaxes(1, 2).reshape(-1)
