"""Write a Qwen3.8 Flash Next of any size with random weights, as its NVFP4 conversions are published.

    python tools/flash_next_checkpoint.py FOLDER [--ngrams ROWS] [--layers linear_attention full_attention]

Widths are the published ones unless the caller of `write_model` changes them. Routed experts and the table of n-grams
are NVFP4, attention stays in 16 bits, the other large matrices are MXFP8: the recipe that people use for this model.
Bytes come from one random block over and over, so that gigabytes are written at the disk's speed.
"""

from __future__ import annotations

import argparse
import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from arriero.model.architectures.qwen4_exp_config import Config
from arriero.model.architectures.qwen4_exp_hash import NGramHash

ROOT = "model.language_model."
BLOCK = 1 << 22
CODES_RMS = 2.93
"""Of a random code of four bits."""

PUBLISHED: dict[str, Any] = {
    "vocab_size": 248320,
    "hidden_size": 2560,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "output_gate_type": "sigmoid",
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "mamba_ssm_dtype": "float32",
    "hc_count": 4,
    "hc_lowrank": 320,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 640,
    "shared_expert_intermediate_size": 640,
    "ple_layer_ids": [1],
    "ple_embed_dim": 2560,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 8,
    "ngram_vocab_size_base": 20_000_000,
    "make_ngram_vocab_size_divisible_by": 128,
    "split_ngram_parts": 128,
    "eos_token_id": 248044,
    "max_position_embeddings": 262144,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
}
"""`text_config` but for the layers."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor to write: `fill` is the standard deviation of numbers, or what to fill with."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    fill: float | np.ndarray | str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * {"BF16": 2, "F32": 4, "I64": 8}.get(self.dtype, 1)


def text_config(layer_types: list[str], **changes: Any) -> dict[str, Any]:
    """The text part of a configuration: published widths, these layers, and changes."""
    return {**PUBLISHED, "num_hidden_layers": len(layer_types), "layer_types": layer_types, **changes}


def write_model(folder: Path, text: dict[str, Any], *, sparse_table: bool = False) -> dict[str, int]:
    """Write config.json and three files of tensors (`dense`, `experts`, `table`); returns the bytes of each.

    `sparse_table` leaves the table's codes and scales as zeros that take no room on the disk.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {"architectures": ["Qwen4ExpForConditionalGeneration"], "model_type": "qwen4_exp", "text_config": text}
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    groups: dict[str, list[Tensor]] = {"dense": [], "experts": [], "table": []}
    for tensor in tensors(text):
        kind = "table" if ".ngram_embedding." in tensor.name else "experts" if ".experts." in tensor.name else "dense"
        groups[kind].append(tensor)
    index: dict[str, str] = {}
    blocks = Blocks()
    for kind, group in groups.items():
        file = f"model-{kind}.safetensors"
        index |= {tensor.name: file for tensor in group}
        _write(folder / file, group, blocks, sparse=sparse_table and kind == "table")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return {kind: sum(tensor.nbytes for tensor in group) for kind, group in groups.items()}


def tensors(text: dict[str, Any]) -> Iterator[Tensor]:
    """Every tensor of the text model, by the names of published files."""
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    yield from _mxfp8(f"{ROOT}embed_tokens", vocab, hidden, 1.0)
    yield from _mxfp8("lm_head", vocab, hidden)
    yield from _reader(f"{ROOT}hyper_connection_mixer", text, writes=False)
    for layer, kind in enumerate(text["layer_types"]):
        prefix = f"{ROOT}layers.{layer}"
        for name in ("attn_hyper_connection", "mlp_hyper_connection"):
            yield from _reader(f"{prefix}.{name}", text, writes=True)
        yield from _delta_net(prefix, text) if kind == "linear_attention" else _attention(prefix, text)
        yield from _experts(f"{prefix}.mlp", text)
        if layer + 1 in text["ple_layer_ids"]:
            yield from _ngrams(f"{prefix}.ple", text)


def _plain(name: str, *shape: int, deviation: float | None = None) -> Tensor:
    return Tensor(name, "BF16", shape, shape[-1] ** -0.5 if deviation is None else deviation)


def _mxfp8(module: str, rows: int, columns: int, deviation: float | None = None) -> Iterator[Tensor]:
    """E4M3 codes of deviation 1, and powers of two."""
    power = round(math.log2(columns**-0.5 if deviation is None else deviation))
    yield Tensor(f"{module}.weight", "F8_E4M3", (rows, columns), 1.0)
    yield Tensor(f"{module}.weight_scale", "U8", (rows, columns // 32), np.array(127 + power, np.uint8))


def _nvfp4(module: str, rows: int, columns: int, multiplier: float, suffix: str = "") -> Iterator[Tensor]:
    """Codes, scales of one, and a factor."""
    yield Tensor(f"{module}.weight", "U8", (rows, columns // 2), "bytes")
    yield Tensor(f"{module}.weight_scale", "F8_E4M3", (rows, columns // 16), np.array(0x38, np.uint8))
    yield Tensor(f"{module}.weight_scale_2", "F32", (), np.array(multiplier, np.float32))


def _reader(prefix: str, text: dict[str, Any], *, writes: bool) -> Iterator[Tensor]:
    width, rank = text["hc_count"] * text["hidden_size"], text["hc_lowrank"]
    yield _plain(f"{prefix}.hc_norm.weight", width, deviation=0.1)
    yield from _mxfp8(f"{prefix}.input_mix_weight_down", rank, width)
    yield from _mxfp8(f"{prefix}.input_mix_weight_up", width, rank)
    if writes:
        yield _plain(f"{prefix}.block_inject_weight.weight", text["hc_count"], width)


def _delta_net(prefix: str, text: dict[str, Any]) -> Iterator[Tensor]:
    hidden, heads = text["hidden_size"], text["linear_num_value_heads"]
    keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    values = heads * text["linear_value_head_dim"]
    prefix += ".linear_attn"
    yield from _mxfp8(f"{prefix}.in_proj_qkv", 2 * keys + values, hidden)
    yield from _mxfp8(f"{prefix}.in_proj_z", values, hidden)
    yield from _mxfp8(f"{prefix}.out_proj", hidden, values)
    for name in ("in_proj_a", "in_proj_b"):
        yield _plain(f"{prefix}.{name}.weight", heads, hidden)
    yield _plain(f"{prefix}.conv1d.weight", 2 * keys + values, 1, text["linear_conv_kernel_dim"], deviation=0.5)
    yield _plain(f"{prefix}.norm.weight", text["linear_value_head_dim"], deviation=1.0)
    for name in ("A_log", "dt_bias"):
        yield _plain(f"{prefix}.{name}", heads, deviation=1.0)


def _attention(prefix: str, text: dict[str, Any]) -> Iterator[Tensor]:
    hidden, width = text["hidden_size"], text["head_dim"]
    heads, kv_heads = text["num_attention_heads"], text["num_key_value_heads"]
    prefix += ".self_attn"
    yield _plain(f"{prefix}.q_proj.weight", 2 * heads * width, hidden)
    yield _plain(f"{prefix}.k_proj.weight", kv_heads * width, hidden)
    yield _plain(f"{prefix}.v_proj.weight", kv_heads * width, hidden)
    yield _plain(f"{prefix}.o_proj.weight", hidden, heads * width)
    yield _plain(f"{prefix}.q_norm.weight", width, deviation=0.1)
    yield _plain(f"{prefix}.k_norm.weight", width, deviation=0.1)
    index = text["indexer_head_dim"]
    rows = (text["indexer_n_heads"] + text["indexer_kv_heads"]) * index
    yield _plain(f"{prefix}.indexer.index_qk_proj.weight", rows, hidden)
    for name in ("q_layernorm", "k_layernorm"):
        yield _plain(f"{prefix}.indexer.{name}.weight", index, deviation=0.1)


def _experts(prefix: str, text: dict[str, Any]) -> Iterator[Tensor]:
    hidden, inner, shared = (
        text[name] for name in ("hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size")
    )
    yield _plain(f"{prefix}.gate.weight", text["num_experts"], hidden)
    yield _plain(f"{prefix}.shared_expert_gate.weight", 1, hidden)
    for name, rows, columns in (("gate", shared, hidden), ("up", shared, hidden), ("down", hidden, shared)):
        yield from _mxfp8(f"{prefix}.shared_expert.{name}_proj", rows, columns)
    for expert in range(text["num_experts"]):
        for name, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            # Factors differ from expert to expert, as they do in published files.
            multiplier = columns**-0.5 / CODES_RMS * (1 + expert % 7 / 8)
            yield from _nvfp4(f"{prefix}.experts.{expert}.{name}_proj", rows, columns, multiplier)


def _ngrams(prefix: str, text: dict[str, Any]) -> Iterator[Tensor]:
    ngrams = Config.read({"architectures": ["Qwen4ExpForCausalLM"], "model_type": "qwen4_exp", **text}).ngrams
    assert ngrams is not None
    hash_ = NGramHash.of(ngrams, 0)
    hidden, width = text["hidden_size"], text["hc_count"] * text["hidden_size"]
    yield _plain(f"{prefix}.key_proj.weight", width, ngrams.width)
    yield _plain(f"{prefix}.value_proj.weight", hidden, ngrams.width)
    for name in ("norm_key", "norm_query", "norm_conv"):
        yield _plain(f"{prefix}.{name}.weight", width, deviation=0.1)
    yield _plain(f"{prefix}.conv1d.weight", width, 1, ngrams.taps, deviation=0.5)
    stored = {
        "layer_multipliers": hash_.multipliers,
        "ngram_heads_vocab_sizes": hash_.sizes,
        "ngram_heads_offsets": hash_.offsets,
    }
    for name, numbers in stored.items():
        yield Tensor(f"{prefix}.ple_embedding.{name}", "I64", numbers.shape, numbers)
    rows = -(-hash_.rows // ngrams.divisor) * ngrams.divisor // ngrams.shards
    for shard in range(ngrams.shards):
        table = f"{prefix}.ple_embedding.ngram_embedding.shard_{shard}"
        yield from _nvfp4(table, rows, ngrams.width // ngrams.rows_per_token, (1 + shard % 5) / CODES_RMS)


class Blocks:
    """Random bytes for each kind of tensor, made once."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)
        self._normal = self._rng.standard_normal(BLOCK, np.float32)
        self._made: dict[tuple[str, float], bytes] = {}

    def of(self, tensor: Tensor) -> bytes:
        """A block of bytes to repeat."""
        if isinstance(tensor.fill, str):
            return self._cached(("bytes", 0.0), lambda: self._rng.bytes(BLOCK))
        if not isinstance(tensor.fill, float):
            whole = tensor.fill
            return whole.tobytes() * (BLOCK if whole.ndim == 0 and whole.itemsize == 1 else 1)
        kind = ml_dtypes.bfloat16 if tensor.dtype == "BF16" else ml_dtypes.float8_e4m3fn
        return self._cached(
            (tensor.dtype, tensor.fill), lambda: (self._normal * np.float32(tensor.fill)).astype(kind).tobytes()
        )

    def _cached(self, key: tuple[str, float], make: Any) -> bytes:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def _write(path: Path, group: list[Tensor], blocks: Blocks, *, sparse: bool) -> None:
    header: dict[str, dict[str, Any]] = {}
    offset = 0
    for tensor in group:
        end = offset + tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    turn = 0
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in group:
            if sparse and tensor.shape:
                file.seek(tensor.nbytes, 1)
                continue
            block, left = blocks.of(tensor), tensor.nbytes
            # Each tensor begins elsewhere in the block (at a whole number), so that no two are alike.
            start = turn * 4096 % len(block) if len(block) > 8192 else 0
            turn += 1
            while left:
                part = memoryview(block)[start : start + left]
                file.write(part)
                left, start = left - len(part), 0
        file.truncate(8 + len(text) + offset)


def main() -> None:
    """Write a model of two layers, one of each kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ngrams", type=int, default=20_000_000, help="least rows of each of the table's 16 heads")
    parser.add_argument("--layers", nargs="+", default=["linear_attention", "full_attention"])
    options = parser.parse_args()
    sizes = write_model(options.folder, text_config(options.layers, ngram_vocab_size_base=options.ngrams))
    print(", ".join(f"{kind} {size / 1e9:.2f} GB" for kind, size in sizes.items()))


if __name__ == "__main__":
    main()
