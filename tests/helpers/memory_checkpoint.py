"""A checkpoint whose tensors are given as arrays: what architectures are tested with, without a file's format."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from arriero.errors import CheckpointError
from arriero.model.checkpoint import Checkpoint
from arriero.model.stored import TensorInfo
from arriero.model.weight import Quantization, Weight


class MemoryCheckpoint:
    """`names`, `in`, `info`, `tensor`, `weight` and `unused` of a Checkpoint."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, mx.array | Weight], dialect: str = "hf") -> None:
        self.config = config
        self.tensors = dict(tensors)
        self.generation_config: dict[str, Any] = {}
        self.dialect = dialect
        self._taken: set[str] = set()

    @classmethod
    def golden(cls, folder: Path) -> MemoryCheckpoint:
        """A folder with one safetensors file."""
        return cls(json.loads((folder / "config.json").read_text()), dict(mx.load(str(folder / "model.safetensors"))))

    def typed(self) -> Checkpoint:
        return cast(Checkpoint, self)

    def copy(self, **changes: Any) -> MemoryCheckpoint:
        """The same tensors with some fields of the configuration changed (None removes one)."""
        config = {k: v for k, v in {**self.config, **changes}.items() if v is not None}
        return MemoryCheckpoint(config, self.tensors, self.dialect)

    def quantized(
        self, how: Quantization, names: str = "_proj.weight", scales: mx.Dtype | None = None
    ) -> MemoryCheckpoint:
        """Every matrix whose name ends in `names` packed, where its width takes the groups."""
        packed: dict[str, mx.array | Weight] = {}
        for name, value in self.tensors.items():
            packed[name] = quantize(value, how, scales) if name.endswith(names) and _fits(value, how) else value
        return MemoryCheckpoint(self.config, packed, self.dialect)

    def dequantized(self) -> MemoryCheckpoint:
        """Every packed matrix as the dense float32 matrix that it means."""
        dense = {n: v if isinstance(v, mx.array) else dequantize(v) for n, v in self.tensors.items()}
        return MemoryCheckpoint(self.config, cast(dict[str, mx.array | Weight], dense), self.dialect)

    def names(self) -> list[str]:
        return list(self.tensors)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def info(self, name: str) -> TensorInfo:
        """Shape and layout; the stored type is not spelled as a file would."""
        value = self.tensors[name]
        how = value.quantization if isinstance(value, Weight) else None
        return TensorInfo(name, str(value.dtype) if isinstance(value, mx.array) else "", tuple(value.shape), how, 0)

    def tensor(self, name: str) -> mx.array:
        value = self._take(name)
        if isinstance(value, Weight):
            raise CheckpointError(f"tensor {name} is packed")
        return value

    def weight(self, name: str) -> Weight:
        value = self._take(name)
        # A weight is repacked when it is used, and tests load a checkpoint more than once.
        return replace(value) if isinstance(value, Weight) else Weight(value)

    def unused(self) -> list[str]:
        return [name for name in self.tensors if name not in self._taken]

    def _take(self, name: str) -> mx.array | Weight:
        if name not in self.tensors:
            raise CheckpointError(f"tensor {name} is missing")
        self._taken.add(name)
        return self.tensors[name]


def quantize(value: mx.array | Weight, how: Quantization, scales: mx.Dtype | None = None) -> Weight:
    """A dense array in one of MLX's packed layouts, affine scales in the dtype `scales`."""
    assert isinstance(value, mx.array)
    data, *rest = mx.quantize(value.astype(mx.float32), group_size=how.group_size, bits=how.bits, mode=how.mode)
    if scales is not None and how.mode == "affine":
        rest = [part.astype(scales) for part in rest]
    return Weight(data, how, rest[0], rest[1] if len(rest) > 1 else None)


def dequantize(weight: Weight) -> mx.array:
    """The float32 values of a weight, by MLX, global scale included (one, or one per leading index)."""
    if weight.quantization is None:
        return weight.data
    how = weight.quantization
    scales, biases = weight.scales, weight.biases
    if biases is not None and scales is not None:
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    values = mx.dequantize(
        weight.data, scales, biases, group_size=how.group_size, bits=how.bits, mode=how.mode, dtype=mx.float32
    )
    if weight.global_scale is not None:
        extra = weight.global_scale.ndim
        values = values * weight.global_scale.reshape(*weight.global_scale.shape, *[1] * (values.ndim - extra))
    return values


def _fits(value: mx.array | Weight, how: Quantization) -> bool:
    # MLX's CPU encoder of nvfp4 wants multiples of 32 although groups hold 16.
    return isinstance(value, mx.array) and value.ndim == 2 and value.shape[-1] % max(32, how.group_size) == 0
