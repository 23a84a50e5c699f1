"""Writes a GGUF model of a known shape with random weights, for measurements of speed. It answers nonsense.

    python -m tools.random_model [FILE] [--type Q4_1] [--head Q8_0]

The shape is that of Llama 3.2 1B: 16 layers of 2048, 32 heads and 8 of keys and values of 64, 8192 inside, 128,256
tokens, the head tied to the embedding; 1.24 billion weights. Without FILE it lies beside the models of
`tools/models.py`. Prints the file's path.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

from tools.models import cache_folder

DEVIATION = 0.02
"""Of the weights: what initialisation uses, so that activations stay of the size that they have in a real model."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model; those of Llama 3.2 1B."""

    layers: int = 16
    hidden: int = 2048
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 64
    inner: int = 8192
    vocab: int = 128_256
    context: int = 131_072

    def matrices(self) -> Iterator[tuple[str, int, int]]:
        """GGUF names of the layers' matrices, rows, columns."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for layer in range(self.layers):
            yield f"blk.{layer}.attn_q.weight", queries, self.hidden
            yield f"blk.{layer}.attn_k.weight", keys, self.hidden
            yield f"blk.{layer}.attn_v.weight", keys, self.hidden
            yield f"blk.{layer}.attn_output.weight", self.hidden, queries
            yield f"blk.{layer}.ffn_gate.weight", self.inner, self.hidden
            yield f"blk.{layer}.ffn_up.weight", self.inner, self.hidden
            yield f"blk.{layer}.ffn_down.weight", self.hidden, self.inner


def q4_0(draw: np.random.Generator, blocks: int) -> np.ndarray:
    """Bytes `[blocks, 18]`: a float16 step, and 32 codes of 4 bits around 8."""
    return _blocks([_steps(draw, blocks, DEVIATION / 4.6), _codes(draw, blocks, 16)])


def q4_1(draw: np.random.Generator, blocks: int) -> np.ndarray:
    """Bytes `[blocks, 20]`: a float16 step and a least value, and 32 codes of 4 bits."""
    steps = _steps(draw, blocks, DEVIATION / 4.6)
    return _blocks([steps, (-7.5 * steps).astype(np.float16), _codes(draw, blocks, 16)])


def q8_0(draw: np.random.Generator, blocks: int) -> np.ndarray:
    """Bytes `[blocks, 34]`: a float16 step, and 32 signed bytes."""
    return _blocks([_steps(draw, blocks, DEVIATION / 73.9), _codes(draw, blocks, 32)])


TYPES: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {"Q4_0": q4_0, "Q4_1": q4_1, "Q8_0": q8_0}


def _steps(draw: np.random.Generator, blocks: int, mean: float) -> np.ndarray:
    return (mean * draw.uniform(0.8, 1.2, (blocks, 1))).astype(np.float16)


def _codes(draw: np.random.Generator, blocks: int, width: int) -> np.ndarray:
    return np.frombuffer(draw.bytes(blocks * width), np.uint8).reshape(blocks, width)


def _blocks(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([part.view(np.uint8) for part in parts], axis=1)


def write(path: Path, shape: Shape, kind: str, head: str, seed: int = 0) -> None:
    """The model with matrices of one type and a tied head of another; appears under its name when it is complete."""
    draw = np.random.default_rng(seed)
    part = path.with_name(f".{path.name}.part")
    writer = gguf.GGUFWriter(str(part), "llama")
    writer.add_name(f"random weights, {shape.layers} layers")
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(500_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocab)
    writer.add_tokenizer_model("no_vocab")
    matrices = [("token_embd.weight", shape.vocab, shape.hidden, head), *((*m, kind) for m in shape.matrices())]
    gains = ["output_norm", *(f"blk.{i}.{name}" for i in range(shape.layers) for name in ("attn_norm", "ffn_norm"))]
    for name, rows, columns, of in matrices:
        quantization = gguf.GGMLQuantizationType[of]
        block, size = gguf.GGML_QUANT_SIZES[quantization]
        width = columns // block * size
        writer.add_tensor_info(name, (rows, width), np.dtype(np.uint8), rows * width, quantization)
    for name in gains:
        writer.add_tensor_info(f"{name}.weight", (shape.hidden,), np.dtype(np.float32), 4 * shape.hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, rows, columns, of in matrices:
        writer.write_tensor_data(TYPES[of](draw, rows * columns // 32))
    for _ in gains:
        writer.write_tensor_data(np.ones(shape.hidden, np.float32))
    writer.close()
    part.replace(path)


def made(kind: str = "Q4_1", head: str = "Q8_0") -> Path:
    """The path of the shape of Llama 3.2 1B in the folder of the real models, written if it isn't there."""
    path = cache_folder() / f"random-llama-1b-{kind}-{head}.gguf"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, Shape(), kind, head)
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--type", choices=TYPES, default="Q4_1", dest="kind")
    parser.add_argument("--head", choices=TYPES, default="Q8_0")
    options = parser.parse_args(arguments)
    if options.file is None:
        print(made(options.kind, options.head))
    else:
        write(options.file, Shape(), options.kind, options.head)
        print(options.file)


if __name__ == "__main__":
    main()
