"""Tensors that an import makes, rather than copies: what their file holds is known before any number is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from arriero.formats.safetensors import BITS

Sink = Callable[[bytes | memoryview], None]
"""Takes a file's bytes in order."""
Told = Callable[[int], None]
"""Is told source bytes as they are done."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of a file: safetensors type and shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * BITS[self.dtype] // 8


class Made(Protocol):
    """A tensor and its companions, computed piece by piece."""

    @property
    def pieces(self) -> dict[str, Piece]:
        """By name, in the order of their bytes."""
        ...

    @property
    def source_bytes(self) -> int:
        """What `told` will have been told."""
        ...

    @property
    def lossless(self) -> bool: ...

    def write(self, sink: Sink, told: Told) -> float:
        """Give all bytes in order; the relative error of the numbers (root mean square), 0 where exact."""
        ...
