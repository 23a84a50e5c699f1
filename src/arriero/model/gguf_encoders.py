"""GGUF files of encoders: their metadata as a configuration, their tensors by the names that the encoders' files have.

Source: the GGUF specification's keys, and what llama.cpp's files of BERT and Nomic's BERT hold.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from arriero.errors import CheckpointError
from arriero.formats.gguf import GGUFFile, GGUFTensor
from arriero.model.gguf_keys import Keys

ENCODERS = {"bert": "BertModel", "nomic-bert": "NomicBertModel"}

_TOP = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
}
_NORM = {"bert": "embeddings.LayerNorm", "nomic-bert": "emb_ln"}
_LAYER = {"bert": "encoder.layer", "nomic-bert": "encoder.layers"}
_MODULES = {
    "bert": {
        "attn_q": "attention.self.query",
        "attn_k": "attention.self.key",
        "attn_v": "attention.self.value",
        "attn_output": "attention.output.dense",
        "attn_output_norm": "attention.output.LayerNorm",
        "ffn_up": "intermediate.dense",
        "ffn_down": "output.dense",
        "layer_output_norm": "output.LayerNorm",
    },
    "nomic-bert": {
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.out_proj",
        "attn_output_norm": "norm1",
        "ffn_up": "mlp.fc11",
        "ffn_gate": "mlp.fc12",
        "ffn_down": "mlp.fc2",
        "layer_output_norm": "norm2",
    },
}
_NAME = re.compile(r"^(?:blk\.(\d+)\.)?([a-z_]+)\.(weight|bias)$")


def encoder_name(architecture: str, name: str) -> str:
    """The tensor's name in a file of the encoder's own; names that we do not know stay as they are."""
    match = _NAME.match(name)
    if match is None:
        return name
    layer, module, kind = match.groups()
    if layer is not None and module in _MODULES[architecture]:
        return f"{_LAYER[architecture]}.{layer}.{_MODULES[architecture][module]}.{kind}"
    if layer is None and module == "token_embd_norm":
        return f"{_NORM[architecture]}.{kind}"
    return f"{_TOP[module]}.{kind}" if layer is None and module in _TOP else name


def encoder_config(file: GGUFFile, architecture: str, tensors: Mapping[str, GGUFTensor]) -> dict[str, Any]:
    """The configuration; CheckpointError for a key or tensor that is missing or not honoured."""
    keys = Keys(file, architecture, tensors)
    if keys.get("attention.causal", bool):
        raise CheckpointError(f"{file.path}: {architecture}.attention.causal is true, which an encoder is not")
    if keys.integer("expert_count"):
        raise CheckpointError(f"{file.path}: {architecture} with experts is not supported")
    config: dict[str, Any] = {
        "architectures": [ENCODERS[architecture]],
        "model_type": architecture.replace("-", "_"),
        "hidden_size": keys.need("embedding_length"),
        "intermediate_size": keys.need("feed_forward_length"),
        "num_hidden_layers": keys.need("block_count"),
        "num_attention_heads": keys.need("attention.head_count"),
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon") or 1e-12,
        "vocab_size": _rows(file, tensors, "token_embd.weight"),
        "type_vocab_size": _rows(file, tensors, "token_types.weight"),
    }
    if architecture == "bert":
        # Files of RoBERTa's kin leave out the rows before the first position.
        return config | {"max_position_embeddings": _rows(file, tensors, "position_embd.weight"), "hidden_act": "gelu"}
    return config | {
        "max_position_embeddings": keys.need("context_length"),
        "rotary_emb_base": keys.number("rope.freq_base") or 1000.0,
        "activation_function": "swiglu",
    }


def _rows(file: GGUFFile, tensors: Mapping[str, GGUFTensor], name: str) -> int:
    tensor = tensors.get(name)
    if tensor is None or len(tensor.shape) != 2:
        raise CheckpointError(f"{file.path}: the tensor {name} is missing or no table; pull the model again")
    return int(tensor.shape[0])
