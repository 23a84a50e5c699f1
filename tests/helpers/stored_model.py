"""Tiny stored models for tests of the server: a byte-level tokenizer, a template, and weights that nobody reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from safetensors.numpy import save
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from arriero.store import manifests
from arriero.store.manifests import CONFIG, ConfigBlob, Layer, Manifest
from arriero.store.store import Store

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(special: Sequence[str] = SPECIAL) -> Tokenizer:
    """One token a byte (ids 0–255 by byte value), then the special tokens."""
    tokenizer = Tokenizer(models.BPE(vocab=dict(_byte_vocab()), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return tokenizer


def _byte_vocab() -> list[tuple[str, int]]:
    """GPT-2's printable stand-in of each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    stand_in = {byte: chr(byte) for byte in printable}
    for index, byte in enumerate(byte for byte in range(256) if byte not in stand_in):
        stand_in[byte] = chr(256 + index)
    return [(stand_in[byte], byte) for byte in range(256)]


def put_model(
    store: Store,
    name: str = "tiny",
    *,
    template: str = CHATML,
    special: Sequence[str] = SPECIAL,
    end: str = "<|im_end|>",
    context_length: int = 4096,
    capabilities: Sequence[str] | None = None,
    parser: str = "",
    renderer: str = "",
    system: str = "",
    params: Mapping[str, Any] | None = None,
    messages: Sequence[Mapping[str, Any]] = (),
    weights: float = 0.0,
) -> None:
    """Store a safetensors model with a byte-level tokenizer under `name`; '' means no template at all."""
    end_id = byte_tokenizer(special).token_to_id(end)
    files = {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "vocab_size": 256 + len(special),
            "max_position_embeddings": context_length,
            "eos_token_id": end_id,
        },
        "tokenizer.json": json.loads(byte_tokenizer(special).to_str()),
        "tokenizer_config.json": {"eos_token": end} | ({"chat_template": template} if template else {}),
    }
    with store.building() as build:
        layers = []

        def add(media_type: str, data: bytes, label: str = "") -> Layer:
            blob = build.add(data)
            return Layer(media_type=media_type, digest=blob.digest, size=blob.size, name=label)

        weight = "model.embed_tokens.weight"
        layers.append(add(manifests.TENSOR, save({weight: np.full((4, 8), weights, np.float32)}), weight))
        layers += [add(manifests.JSON, json.dumps(value).encode(), label) for label, value in files.items()]
        if system:
            layers.append(add(manifests.SYSTEM, system.encode()))
        if params:
            layers.append(add(manifests.PARAMS, json.dumps(params).encode()))
        if messages:
            layers.append(add(manifests.MESSAGES, json.dumps(list(messages)).encode()))
        config = ConfigBlob(
            model_format="safetensors",
            model_family="llama",
            parser=parser,
            renderer=renderer,
            capabilities=None if capabilities is None else list(capabilities),
        )
        build.put(name, Manifest.build(add(CONFIG, config.encode()), layers))
