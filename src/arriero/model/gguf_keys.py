"""The metadata of a GGUF file's architecture, read with types checked.

Refuses to know MLX.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from arriero.errors import CheckpointError
from arriero.formats.gguf import GGUFFile


class Keys:
    """The metadata of one architecture, with types checked and errors that name the key."""

    def __init__(self, file: GGUFFile, architecture: str, tensors: Collection[str] = ()) -> None:
        self.path = file.path
        self.metadata: Mapping[str, Any] = file.metadata
        self.tensors = tensors
        """The names of all tensors of the model."""
        self.prefix = architecture

    def get(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """The value of `<architecture>.<key>`, or None when it is absent."""
        name = f"{self.prefix}.{key}"
        value = self.metadata.get(name)
        if value is None:
            return None
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.unusable(key, value)
        return value

    def unusable(self, key: str, value: Any) -> CheckpointError:
        return CheckpointError(f"{self.path}: the key {self.prefix}.{key} has the unusable value {value!r:.60}")

    def need(self, key: str) -> int:
        """A positive whole number that must be there."""
        value = self.integer(key)
        if not value:
            raise CheckpointError(
                f"{self.path}: the key {self.prefix}.{key} is missing or zero; create the model again"
            )
        return value

    def integer(self, key: str) -> int | None:
        """A whole number of 0 or more."""
        value = self.get(key, int)
        if value is not None and value < 0:
            raise self.unusable(key, value)
        return None if value is None else int(value)

    def number(self, key: str) -> float | None:
        """A float32 of 0 or more in its shortest decimal form (1e-05, not 9.999999747378752e-06)."""
        value = self.get(key, (int, float))
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise self.unusable(key, value)
        return None if value is None else float(f"{value:.7g}")

    def largest_of_layers(self, key: str) -> int | None:
        """A number that may be stored once per layer; the largest of them."""
        value = self.get(key, (int, list))
        if not isinstance(value, list):
            return self.integer(key)
        if not value or not all(type(item) is int and item >= 0 for item in value):
            raise self.unusable(key, value)
        largest: int = max(value)
        return largest

    def same_for_all_layers(self, key: str, *, zeros: bool = False) -> int | None:
        """A number that may be stored once per layer, if all layers agree (with `zeros`: all that have it)."""
        value = self.get(key, (int, list))
        if not isinstance(value, list):
            return self.integer(key)
        if zeros:
            value = [item for item in value if item != 0]
        if not value or any(item != value[0] for item in value):
            raise CheckpointError(f"{self.path}: the key {self.prefix}.{key} differs between layers; not supported")
        first = value[0]
        if not isinstance(first, int) or first < 0:
            raise self.unusable(key, value)
        return first
