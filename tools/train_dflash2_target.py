"""A Llama of a GGUF file in PyTorch: as many rows at once as fit, and the outputs of chosen layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf.quants import dequantize
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer; queries, keys and values are one matrix, gate and up another."""

    before: Tensor
    qkv: Tensor
    out: Tensor
    between: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class Heads:
    """Counts of heads, their width, and the base of their rotation."""

    queries: int
    keys: int
    width: int
    theta: float


class Memory:
    """Keys and values of a batch of rows that are all equally long."""

    def __init__(self, target: Target, rows: int, length: int) -> None:
        like = target.table
        shape = (2, rows, target.heads.keys, length, target.heads.width)
        self.layers = [torch.empty(shape, dtype=like.dtype, device=like.device) for _ in target.layers]
        self.length = 0


class Target:
    """The model whose next tokens are to be guessed."""

    def __init__(
        self, heads: Heads, eps: float, layers: list[Layer], table: Tensor, norm: Tensor, head: Tensor, length: int
    ) -> None:
        self.heads = heads
        self.eps = eps
        self.layers = layers
        self.table = table
        self.norm = norm
        self.head = head
        self.turns = rotation(torch.arange(length, device=table.device), heads.width, heads.theta)

    @classmethod
    def load(cls, reader: gguf.GGUFReader, device: str, dtype: torch.dtype, length: int) -> Target:
        """From an open file, for rows of at most `length` tokens; ValueError for anything but a plain Llama."""
        read = Metadata(reader)
        kind = read("general.architecture")
        if kind != "llama":
            raise ValueError(f"the target's architecture is {kind!r}; only 'llama' can be trained for")
        hidden, count = read("llama.embedding_length"), read("llama.attention.head_count")
        keys = read("llama.attention.head_count_kv", count)
        width = read("llama.rope.dimension_count", hidden // count)
        if read("llama.rope.scaling.type", "none") != "none" or any(
            t.name == "rope_freqs.weight" for t in reader.tensors
        ):
            raise ValueError("the target scales its rotations; only plain ones can be trained for")
        if read("llama.attention.key_length", width) != width or width * count != hidden:
            raise ValueError(f"heads of {width} of a width of {hidden} / {count}; they must be equal")
        heads = Heads(count, keys, width, float(read("llama.rope.freq_base", 10000.0)))
        found = {tensor.name: tensor for tensor in reader.tensors}

        def tensor(name: str) -> Tensor:
            if name not in found:
                raise ValueError(f"the target's file holds no {name}")
            values = dequantize(found[name].data, found[name].tensor_type)
            return torch.from_numpy(values.copy()).to(device, dtype)

        def layer(prefix: str) -> Layer:
            query, key = (halves(tensor(f"{prefix}.attn_{name}.weight"), width) for name in "qk")
            return Layer(
                before=tensor(f"{prefix}.attn_norm.weight"),
                qkv=torch.cat([query, key, tensor(f"{prefix}.attn_v.weight")]),
                out=tensor(f"{prefix}.attn_output.weight"),
                between=tensor(f"{prefix}.ffn_norm.weight"),
                gate_up=torch.cat([tensor(f"{prefix}.ffn_{name}.weight") for name in ("gate", "up")]),
                down=tensor(f"{prefix}.ffn_down.weight"),
            )

        table = tensor("token_embd.weight")
        return cls(
            heads,
            float(read("llama.attention.layer_norm_rms_epsilon")),
            [layer(f"blk.{i}") for i in range(read("llama.block_count"))],
            table,
            tensor("output_norm.weight"),
            tensor("output.weight") if "output.weight" in found else table,
            length,
        )

    @torch.no_grad()
    def forward(self, tokens: Tensor, memory: Memory | None = None, taps: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """Tokens `[B, T]` to states before the last norm `[B, T, hidden]`, and taps side by side `[B, T, n · hidden]`.

        Behind a memory that is not empty T must be 1: nothing is masked then.
        """
        rows, count = tokens.shape
        start = 0 if memory is None else memory.length
        if start and count != 1:
            raise ValueError(f"{count} tokens behind a memory of {start}; one at a time")
        turns = self.turns[:, start : start + count]
        x = functional.embedding(tokens, self.table)
        taken: dict[int, Tensor] = {}
        for i, layer in enumerate(self.layers):
            q, k, v = self._split(functional.linear(self._rms(x, layer.before), layer.qkv))
            q, k = rotate(q, turns), rotate(k, turns)
            if memory is not None:
                held = memory.layers[i]
                held[0, :, :, start : start + count], held[1, :, :, start : start + count] = k, v
                k, v = held[:, :, :, : start + count]
            y = self._one(q, k, v) if count == 1 else self._many(q, k, v)
            x = x + functional.linear(y.transpose(1, 2).reshape(rows, count, -1), layer.out)
            gate, up = functional.linear(self._rms(x, layer.between), layer.gate_up).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate) * up, layer.down)
            if i in taps:
                taken[i] = x
        if memory is not None:
            memory.length = start + count
        return x, torch.cat([taken[i] for i in taps], -1) if taps else x[..., :0]

    def logits(self, states: Tensor) -> Tensor:
        """States before the last norm to scores of all tokens."""
        return functional.linear(self._rms(states, self.norm), self.head)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, self.eps)

    def _split(self, qkv: Tensor) -> list[Tensor]:
        """Queries, keys and values `[B, heads, T, width]`."""
        h = self.heads
        parts = qkv.split([h.queries * h.width, h.keys * h.width, h.keys * h.width], -1)
        return [part.unflatten(-1, (-1, h.width)).transpose(1, 2) for part in parts]

    def _one(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One query a row: those that share keys become rows of one attention, which then reads the keys once."""
        grouped = q.reshape(q.shape[0], self.heads.keys, -1, self.heads.width)
        return functional.scaled_dot_product_attention(grouped, k, v).reshape(q.shape)

    def _many(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (part.repeat_interleave(self.heads.queries // self.heads.keys, 1) for part in (k, v))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class Metadata:
    """Values of a file by key."""

    def __init__(self, reader: gguf.GGUFReader) -> None:
        self._reader = reader

    def __call__(self, key: str, default: Any = None) -> Any:
        """ValueError when it is not there and there is no default."""
        field = self._reader.fields.get(key)
        if field is None and default is None:
            raise ValueError(f"the target's file holds no {key}")
        return default if field is None else field.contents()

    def tokenizer(self) -> dict[str, Any]:
        """All that says how text becomes tokens."""
        return {key: f.contents() for key, f in self._reader.fields.items() if key.startswith("tokenizer.")}


def open_file(path: Path) -> gguf.GGUFReader:
    """Its header; weights are mapped."""
    return gguf.GGUFReader(path)


def halves(weight: Tensor, width: int) -> Tensor:
    """Rows of heads whose rotated pairs are neighbours, as a Llama's GGUF file has them, to pairs half a head apart."""
    return weight.unflatten(0, (-1, width // 2, 2)).transpose(1, 2).reshape(weight.shape)


def rotation(positions: Tensor, width: int, theta: float) -> Tensor:
    """Cosines and sines `[2, n, width]` of positions `[n]`, for pairs half a head apart."""
    steps = theta ** (-torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width)
    angles = (positions.float()[:, None] * steps).repeat(1, 2)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Heads `[..., n, width]` turned by their positions' angles, in the type of `x`."""
    cos, sin = turns.to(x.dtype)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin
