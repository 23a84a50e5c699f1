"""What policies ask of a tensor and of its model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_ROUTED = (".experts.", ".switch_mlp.")
_NO_MATRIX = ("_bias", ".bias", ".scale", "_scale", ".qbias", "_blocks", "_scales")


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor by its name in the checkpoint and its logical shape."""

    name: str
    shape: tuple[int, ...]

    @property
    def module(self) -> str:
        """The name without `.weight`."""
        return self.name.removesuffix(".weight")

    @property
    def last(self) -> str:
        """The last word of the module's name: `q_proj`."""
        return self.module.rpartition(".")[2]

    @property
    def routed(self) -> bool:
        """Whether it belongs to a router's experts, alone or in a stack."""
        return any(word in self.name for word in _ROUTED) and not self.name.endswith(_NO_MATRIX)

    @property
    def layer(self) -> int | None:
        """The number of its layer."""
        found = _LAYER.search(self.name)
        return None if found is None else int(found[1])


@dataclass(frozen=True, slots=True)
class Model:
    """The facts of a configuration, looked for at its top and in its `text_config`."""

    layers: int
    experts: int
    fields: Mapping[str, Any]

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        text = config.get("text_config")
        fields = dict(config) | (dict(text) if isinstance(text, Mapping) else {})
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        return cls(_count(fields, ("num_hidden_layers",)), _count(fields, names), fields)

    def more_bits(self, layer: int | None, middle_end: int | None = None) -> bool:
        """Whether a layer is among those that get more bits: the first and last eighth, and every third between.

        `middle_end` is where the third part of that ends, the last eighth by default.
        """
        if layer is None:
            return False
        first, last = self.layers // 8, 7 * self.layers // 8
        end = last if middle_end is None else middle_end
        return layer < first or layer >= last or (layer < end and (layer - first) % 3 == 2)


def _count(fields: Mapping[str, Any], names: tuple[str, ...]) -> int:
    return next((value for name in names if isinstance(value := fields.get(name), int)), 0)
