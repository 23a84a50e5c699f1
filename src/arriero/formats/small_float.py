"""Rounding to the small floating-point formats: float32 to the nearest value of E2M1 or E4M3, ties to even codes.

Written without table searches: adding and subtracting `1.5 · 2**23` steps rounds to a multiple of the step, as float32
itself does. NumPy lets other threads run meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class SmallFloat:
    """A format without infinities: a sign, `exponent` bits with a `bias`, `mantissa` bits, and its largest value."""

    exponent: int
    mantissa: int
    bias: int
    largest: float

    @property
    def smallest_normal(self) -> float:
        return float(2.0 ** (1 - self.bias))

    def nearest(self, values: np.ndarray) -> np.ndarray:
        """The values of the format nearest to float32 values; what is beyond its largest becomes that."""
        limit = np.float32(self.largest)
        clipped = np.clip(values, -limit, limit)
        powers = (clipped.view(np.uint32) & np.uint32(0x7F800000)).view(np.float32)
        np.maximum(powers, np.float32(self.smallest_normal), out=powers)
        powers *= np.float32(1.5 * 2.0 ** (23 - self.mantissa))
        clipped += powers
        clipped -= powers
        nearest: np.ndarray = clipped
        return nearest

    def encode(self, nearest: np.ndarray, sign_of: np.ndarray) -> np.ndarray:
        """Codes uint8 of what `nearest` gave, with the signs of `sign_of` (a zero keeps the sign of its value)."""
        magnitude = np.abs(nearest)
        normal = (magnitude.view(np.uint32) >> np.uint32(23 - self.mantissa)).astype(np.int32)
        normal -= (127 - self.bias) << self.mantissa
        subnormal = (magnitude * np.float32(2.0 ** (self.bias - 1 + self.mantissa))).astype(np.int32)
        codes: np.ndarray = np.where(magnitude < np.float32(self.smallest_normal), subnormal, normal).astype(np.uint8)
        codes |= np.signbit(sign_of).astype(np.uint8) << np.uint8(self.exponent + self.mantissa)
        return codes


E2M1_FLOAT = SmallFloat(exponent=2, mantissa=1, bias=1, largest=6.0)
E4M3_FLOAT = SmallFloat(exponent=4, mantissa=3, bias=7, largest=448.0)
