"""Number formats as the kernels name them."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_UNIT = {4: 128, 8: 64}
"""Weights in 64 bytes of a row, by bits."""


@dataclass(frozen=True, slots=True)
class Format:
    """A packed format that the kernels decode."""

    code: int
    """Its number in formats.cu."""
    bits: int
    group: int
    affine: bool
    undo: str
    """What a decoded weight lacks, a bfloat16 twice over."""

    @property
    def unit(self) -> int:
        """The number of weights that a row's length must be a multiple of."""
        return FIRST_UNIT[self.bits]


FORMATS: dict[tuple[str, int, int], Format] = {
    ("nvfp4", 4, 16): Format(0, 4, 16, False, "0x4C804C80u"),
    ("mxfp4", 4, 32): Format(1, 4, 32, False, "0x5D805D80u"),
    ("mxfp8", 8, 32): Format(2, 8, 32, False, "0x5D805D80u"),
    **{("affine", 4, group): Format(3, 4, group, True, "0x3F803F80u") for group in (32, 64, 128)},
    **{("affine", 8, group): Format(4, 8, group, True, "0x3F803F80u") for group in (32, 64, 128)},
}
"""By MLX's mode, bits and group size."""
