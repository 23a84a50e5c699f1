"""One tensor of an opened checkpoint, before anybody has asked for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from arriero.model.weight import Quantization, Weight


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


@dataclass(frozen=True, slots=True)
class HostWeight:
    """A tensor as read-only views of the mapped file: `data` as stored (packed words or blocks), and its companions."""

    data: np.ndarray
    quantization: Quantization | None = None
    scales: np.ndarray | None = None
    biases: np.ndarray | None = None
    global_scale: np.ndarray | None = None
    """Float32 multiplier, in the convention of `Weight.global_scale`."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor's facts and the two ways to get it."""

    info: TensorInfo
    load: Callable[[], Weight]
    """Makes MLX arrays, lazily where the file allows it."""
    view: Callable[[], HostWeight]
    """Makes no MLX array."""
