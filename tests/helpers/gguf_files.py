"""GGUF files made in tests: a writer that also writes wrong ones, and small models with a tokenizer."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize, quantize

from arriero.formats.gguf_types import BY_NAME

U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10

Tensor = tuple[str, np.ndarray]
"""Type name and bytes uint8 `[..., bytes of a row]`."""


def string(text: str | bytes) -> bytes:
    """A GGUF string: length, then bytes."""
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def value(item: Any) -> bytes:
    """A metadata value with its type in front: int → u32 or i32, float → f32, lists by their first item."""
    if isinstance(item, bool):
        return struct.pack("<I?", BOOL, item)
    if isinstance(item, int):
        return struct.pack("<Ii", I32, item) if item < 0 else struct.pack("<II", U32, item)
    if isinstance(item, float):
        return struct.pack("<If", F32, item)
    if isinstance(item, str):
        return struct.pack("<I", STRING) + string(item)
    encoded = [value(element) for element in item] or [struct.pack("<II", U32, 0)]
    return struct.pack("<I", ARRAY) + encoded[0][:4] + struct.pack("<Q", len(item)) + _bodies(encoded, len(item))


def _bodies(encoded: list[bytes], count: int) -> bytes:
    return b"".join(element[4:] for element in encoded[:count])


def gguf_bytes(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    version: int = 3,
    magic: bytes = b"GGUF",
    alignment: int = 32,
) -> bytes:
    """A whole file; `alignment` is what the data is laid out by (say it in the metadata if it isn't 32)."""
    header = magic + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, item in metadata.items():
        header += string(key) + (item if isinstance(item, bytes) else value(item))
    data = b""
    for name, (kind, raw) in tensors.items():
        block = BY_NAME[kind]
        columns = raw.shape[-1] // block.nbytes * block.block
        dimensions = [columns, *reversed(raw.shape[:-1])]
        header += string(name) + struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
        header += struct.pack("<IQ", block.id, len(data))
        data += raw.tobytes()
        data += bytes(-len(data) % alignment)
    return header + bytes(-len(header) % alignment) + data


def encode(kind: str, values: np.ndarray) -> Tensor:
    """Values as a tensor of a type that the gguf package can write (F32, F16, BF16, Q4_0 … Q8_0, MXFP4)."""
    return kind, np.ascontiguousarray(quantize(values.astype(np.float32), gguf.GGMLQuantizationType[kind])).view(
        np.uint8
    )


def decoded(tensor: Tensor) -> np.ndarray:
    """The float32 values of a tensor by the gguf package."""
    kind, raw = tensor
    with np.errstate(over="ignore"):
        return np.asarray(dequantize(raw, gguf.GGMLQuantizationType[kind]), np.float32)


SCALE_OFFSETS = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "IQ4_NL": [0],
    "IQ4_XS": [0],
    "IQ2_XS": [0],
    "IQ3_S": [0],
    "TQ2_0": [64],
}
"""Where the float16 numbers of a block are."""


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0, scale: float = 0.01) -> np.ndarray:
    """Random bytes of a block type with finite block scales of about `scale`, uint8 `[rows, bytes of a row]`."""
    rng = np.random.default_rng(seed)
    block = BY_NAME[kind]
    raw = rng.integers(0, 256, (rows, columns // block.block, block.nbytes), dtype=np.uint8)
    for offset in SCALE_OFFSETS.get(kind, []):
        halves = rng.normal(0, scale, raw.shape[:2]).clip(-65504, 65504).astype("<f2")
        raw[..., offset : offset + 2] = halves[..., None].view(np.uint8)
    if kind.startswith("MXFP4"):
        raw[..., 0] = rng.integers(110, 130, raw.shape[:2])
    if kind == "NVFP4":
        raw[..., :4] = rng.integers(0, 0x7F, (*raw.shape[:2], 4))
    return raw.reshape(rows, -1)


def byte_level_alphabet() -> list[str]:
    """The 256 printable stand-ins of byte-level BPE, by byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def tokenizer_metadata() -> dict[str, Any]:
    """A byte-level BPE tokenizer: `<|endoftext|>`, `<|im_start|>`, `<|im_end|>`, 256 bytes and a few merges."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld"]
    words = [merge.replace(" ", "") for merge in merges]
    tokens = special + byte_level_alphabet() + words
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(special) + [1] * (len(tokens) - len(special)),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{{ message.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n",
    }


def interleave_rotary(rows: np.ndarray, heads: int) -> np.ndarray:
    """Hugging Face's q or k rows in the order of GGUF's llama architecture."""
    grouped = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return grouped.swapaxes(1, 2).reshape(rows.shape)


def write_tiny_llama_gguf(
    path: str | Path,
    kind: str = "F32",
    *,
    layers: int = 2,
    hidden: int = 64,
    intermediate: int = 96,
    heads: int = 4,
    kv_heads: int = 2,
    tied: bool = True,
    context: int = 512,
    seed: int = 0,
    metadata: Mapping[str, Any] | None = None,
) -> dict[str, np.ndarray]:
    """Write a random llama with a byte-level tokenizer (268 tokens) and its matrices in `kind` (see `encode`).

    `metadata` adds keys or replaces them. Returns the float32 tensors that the file stands for, by Hugging Face name
    and in Hugging Face's row order.
    """
    rng = np.random.default_rng(seed)
    keys = {
        "general.architecture": "llama",
        "general.name": "Tiny",
        "general.file_type": 0,
        "llama.block_count": layers,
        "llama.context_length": context,
        "llama.embedding_length": hidden,
        "llama.feed_forward_length": intermediate,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": hidden // heads,
        **tokenizer_metadata(),
        **(metadata or {}),
    }
    vocabulary = len(keys["tokenizer.ggml.tokens"])
    tensors: dict[str, Tensor] = {}
    meaning: dict[str, np.ndarray] = {}

    def matrix(name: str, meant: str, rows: int, columns: int, rotary_heads: int = 0) -> None:
        values = rng.normal(0, columns**-0.5, (rows, columns)).astype(np.float32)
        stored, raw = encode(kind, values)
        meaning[meant] = decoded((stored, raw)).reshape(rows, columns)
        tensors[name] = (stored, interleave_rotary(raw, rotary_heads) if rotary_heads else raw)

    def gain(name: str, meant: str) -> None:
        values = rng.normal(1, 0.1, hidden).astype(np.float32)
        meaning[meant] = values
        tensors[name] = ("F32", values.view(np.uint8))

    matrix("token_embd.weight", "model.embed_tokens.weight", vocabulary, hidden)
    for layer in range(layers):
        here, there = f"blk.{layer}.", f"model.layers.{layer}."
        gain(here + "attn_norm.weight", there + "input_layernorm.weight")
        kv = hidden // heads * kv_heads
        matrix(here + "attn_q.weight", there + "self_attn.q_proj.weight", hidden, hidden, heads)
        matrix(here + "attn_k.weight", there + "self_attn.k_proj.weight", kv, hidden, kv_heads)
        matrix(here + "attn_v.weight", there + "self_attn.v_proj.weight", kv, hidden)
        matrix(here + "attn_output.weight", there + "self_attn.o_proj.weight", hidden, hidden)
        gain(here + "ffn_norm.weight", there + "post_attention_layernorm.weight")
        matrix(here + "ffn_gate.weight", there + "mlp.gate_proj.weight", intermediate, hidden)
        matrix(here + "ffn_up.weight", there + "mlp.up_proj.weight", intermediate, hidden)
        matrix(here + "ffn_down.weight", there + "mlp.down_proj.weight", hidden, intermediate)
    gain("output_norm.weight", "model.norm.weight")
    if not tied:
        matrix("output.weight", "lm_head.weight", vocabulary, hidden)
    Path(path).write_bytes(gguf_bytes(keys, tensors))
    return meaning
