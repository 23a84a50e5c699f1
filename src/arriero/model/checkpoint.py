"""The opened checkpoint: configuration and tensors by Hugging Face name, whatever file they came from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, Self

import mlx.core as mx
import numpy as np

from arriero.errors import CheckpointError
from arriero.formats.mapped import REPAIR
from arriero.model import checkpoint_gguf, checkpoint_safetensors
from arriero.model.stored import HostWeight, Stored, TensorInfo
from arriero.model.weight import Weight
from arriero.source import FolderSource, GGUFSource, LayersSource, ModelSource

__all__ = ["Checkpoint", "HostWeight", "TensorInfo"]

Dialect = Literal["hf", "mlx", "gguf"]


class Checkpoint:
    """One opened model; every header is validated before the first tensor is used.

    A tensor is either loaded (`tensor`, `weight`) or kept on the host (`host`, `host_weight`), never both.
    """

    config: dict[str, Any]
    """As in Hugging Face's config.json (made from the metadata for GGUF)."""
    generation_config: dict[str, Any]
    dialect: Dialect
    """Where it came from, for the few conventions that differ (GGUF bakes `1 + w` into Gemma's norms)."""
    exact: bool = True
    """What the weights that it gives say: see `Weight.exact`."""
    on_load: Callable[[], None] | None = None
    """Called before each tensor is taken, so that a load can tell how far it is."""

    def __init__(
        self,
        label: str,
        stored: dict[str, Stored],
        config: dict[str, Any],
        generation_config: dict[str, Any],
        dialect: Dialect,
    ) -> None:
        self.label = label
        self.config = config
        self.generation_config = generation_config
        self.dialect = dialect
        self._stored = _named(stored)
        self._loaded: set[str] = set()
        self._hosted: set[str] = set()

    @classmethod
    def open(cls, source: ModelSource) -> Self:
        """Open and validate a model; reads headers and configuration only.

        Raises CheckpointError naming the file and the tensor when something is missing, damaged or unknown.
        """
        if isinstance(source, GGUFSource):
            return cls(*checkpoint_gguf.read(source))
        if isinstance(source, FolderSource):
            return cls(*checkpoint_safetensors.read_folder(source))
        return cls(*checkpoint_safetensors.read_layers(source))

    @classmethod
    def open_draft(cls, source: ModelSource) -> Self | None:
        """Open the draft that is stored beside a model, as `open` does; None where there is none."""
        layers = source.draft if isinstance(source, GGUFSource) else source
        if not isinstance(layers, LayersSource) or not checkpoint_safetensors.has_draft(layers):
            return None
        return cls(*checkpoint_safetensors.read_layers(layers, draft=True))

    @property
    def nbytes(self) -> int:
        """Bytes of the files that loading reads: everything but what was taken with `host`."""
        return sum(stored.info.nbytes for name, stored in self._stored.items() if name not in self._hosted)

    def names(self) -> list[str]:
        """All tensors, companions (scales, biases of affine) folded into theirs."""
        return list(self._stored)

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def info(self, name: str) -> TensorInfo:
        """Facts of a tensor; CheckpointError when missing."""
        return self._find(name).info

    def tensor(self, name: str) -> mx.array:
        """A dense tensor in its stored dtype, lazily; CheckpointError when missing or packed."""
        found = self._find(name)
        if found.info.quantization is not None:
            packed = found.info.quantization.name
            raise CheckpointError(f"{self.label}: tensor {name} is packed as {packed}, expected plain numbers")
        return self._load(name).data

    def weight(self, name: str) -> Weight:
        """A matrix, dense or packed as stored; CheckpointError when missing or made of codes without scales."""
        weight = self._load(name)
        if weight.quantization is None and not mx.issubdtype(weight.data.dtype, mx.floating):
            raise CheckpointError(
                f"{self.label}: tensor {name} is stored as {self.info(name).dtype} and has no scales that we know: "
                "a quantisation that is not supported; use the original model or one quantised for MLX"
            )
        return weight if self.exact else replace(weight, exact=False)

    def _load(self, name: str) -> Weight:
        found = self._find(name)
        if name in self._hosted:
            raise CheckpointError(f"{self.label}: tensor {name} is kept on the host and cannot be loaded as well")
        if self.on_load is not None:
            self.on_load()
        weight = found.load()
        self._loaded.add(name)
        return weight

    def host(self, name: str) -> np.ndarray:
        """A read-only view of the mapped file that never becomes an MLX array and is excluded from loading.

        Packed tensors come as their stored words or blocks; `host_weight` gives the scales too. bfloat16 is
        `ml_dtypes.bfloat16`, 8-bit floats are their codes as uint8.
        """
        return self.host_weight(name).data

    def host_weight(self, name: str) -> HostWeight:
        """As `host`, with scales, biases and global scale."""
        found = self._find(name)
        if name in self._loaded:
            raise CheckpointError(f"{self.label}: tensor {name} has been loaded and cannot be kept on the host as well")
        view = found.view()
        self._hosted.add(name)
        return view

    def unused(self) -> list[str]:
        """Tensors that nobody has taken, for the load report."""
        return [name for name in self._stored if name not in self._loaded and name not in self._hosted]

    def _find(self, name: str) -> Stored:
        if name not in self._stored:
            raise CheckpointError(f"{self.label}: tensor {name} is missing; {REPAIR}")
        return self._stored[name]


def _named(stored: dict[str, Stored]) -> dict[str, Stored]:
    """The tensors under the names that architectures know: files of a network without a head leave out `model.`, as
    those of many models for embeddings do.
    """
    if "embed_tokens.weight" not in stored or any(name.startswith(("model.", "lm_head.")) for name in stored):
        return stored
    return {f"model.{name}": tensor for name, tensor in stored.items()}
