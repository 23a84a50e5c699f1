"""The opened checkpoint: configuration and tensors by Hugging Face name, whatever file they came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Self

import mlx.core as mx
import numpy as np

from arriero.model.weight import Quantization, Weight
from arriero.source import ModelSource


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What is known of a tensor before it is read."""

    name: str
    dtype: str
    """Stored element type, safetensors or GGUF spelling (`BF16`, `Q4_K`, `U32`)."""
    shape: tuple[int, ...]
    """Logical shape, unpacked."""
    quantization: Quantization | None
    """The packed layout that `weight()` gives."""
    nbytes: int
    """Bytes in the file, companions included."""


class Checkpoint:
    """One opened model; every header is validated before the first tensor is used."""

    config: dict[str, Any]
    """As in Hugging Face's config.json (made from the metadata for GGUF)."""
    generation_config: dict[str, Any]
    dialect: Literal["hf", "mlx", "gguf"]
    """Where it came from, for the few conventions that differ (GGUF bakes `1 + w` into Gemma's norms)."""

    @classmethod
    def open(cls, source: ModelSource) -> Self:
        raise NotImplementedError

    def names(self) -> list[str]:
        """All tensors, companions (scales, biases of affine) folded into theirs."""
        raise NotImplementedError

    def __contains__(self, name: str) -> bool:
        raise NotImplementedError

    def info(self, name: str) -> TensorInfo:
        raise NotImplementedError

    def tensor(self, name: str) -> mx.array:
        """A dense tensor in its stored dtype, lazily; CheckpointError when missing or packed."""
        raise NotImplementedError

    def weight(self, name: str) -> Weight:
        """A matrix, dense or packed as stored; CheckpointError when missing."""
        raise NotImplementedError

    def host(self, name: str) -> np.ndarray:
        """A read-only view of the mapped file that never becomes an MLX array and is excluded from loading."""
        raise NotImplementedError

    def unused(self) -> list[str]:
        """Tensors that nobody has taken, for the load report."""
        raise NotImplementedError
