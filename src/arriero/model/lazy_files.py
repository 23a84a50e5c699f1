"""Tensors of safetensors files as lazy MLX arrays: bytes are read when an array is evaluated, and only then."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np

from arriero.errors import CheckpointError
from arriero.model.companions import Part

_MAPPED_ONLY = {"F8_E5M2", "F64", "C64", "F4", "F6_E2M3", "F6_E3M2"}
"""Types that MLX's reader refuses together with the file that holds them."""


class LazyFiles:
    """Arrays by file, each given out once so that nothing here keeps a replaced weight alive.

    An array that is still lazy holds its file open. `most_open` bounds that for models of many small files: past it,
    the arrays given out so far are evaluated.
    """

    def __init__(self, most_open: int | None = None) -> None:
        self._most_open = most_open
        self._arrays: dict[Path, dict[str, mx.array]] = {}
        self._copied: dict[Path, bool] = {}
        self._lazy: list[mx.array] = []
        self._opened = 0

    def take(self, part: Part) -> mx.array:
        """The array of one tensor in its stored dtype (8-bit floats as uint8 codes)."""
        path, name = part.file.path, part.span.name
        if path not in self._copied:
            # Once a file: files of experts hold thousands of tensors, and each is taken by itself.
            self._copied[path] = not _MAPPED_ONLY.isdisjoint(span.dtype for span in part.file.tensors.values())
        if self._copied[path]:
            return _copy(part)
        arrays = self._arrays.get(path)
        if arrays is None or name not in arrays:
            arrays = self._open(path)
        array = arrays.pop(name)
        if self._most_open is not None:
            self._lazy.append(array)
        return array

    def _open(self, path: Path) -> dict[str, mx.array]:
        if self._most_open is not None and self._opened >= self._most_open:
            mx.eval(self._lazy)
            self._lazy.clear()
            self._arrays.clear()
            self._opened = 0
        try:
            loaded = mx.load(str(path), format="safetensors")
        except RuntimeError as error:
            raise CheckpointError(f"{path}: MLX cannot read the file ({error})") from error
        assert isinstance(loaded, dict)
        self._opened += 1
        self._arrays[path] = loaded
        return loaded


def _copy(part: Part) -> mx.array:
    values = part.file.view(part.span.name)
    if values.dtype == np.float64:
        raise CheckpointError(
            f"{part.file.path}: tensor {part.span.name} is stored as {part.span.dtype}, which MLX does not hold"
        )
    return mx.array(values.view(np.uint16)).view(mx.bfloat16) if part.span.dtype == "BF16" else mx.array(values)
