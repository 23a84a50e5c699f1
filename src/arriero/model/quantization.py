"""How a packed tensor is coded. Refuses to know MLX: `create` decides layouts without it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mode = Literal["affine", "nvfp4", "mxfp4", "mxfp8"]


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a packed tensor is coded; `group_size` values share one scale (MLX's layouts)."""

    mode: Mode
    bits: int
    group_size: int

    @property
    def name(self) -> str:
        """The field's short name: `nvfp4`, `mxfp8`, `int4`, …"""
        return f"int{self.bits}" if self.mode == "affine" else self.mode
