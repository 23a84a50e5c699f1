"""The small floating-point codes, one value at a time and as tables: E2M1, E4M3, E5M2, E8M0.

Source: OCP Microscaling Formats (MX) 1.0 and OCP 8-bit Floating Point 1.0.
"""

from __future__ import annotations

import math

import numpy as np


def e2m1(code: int) -> float:
    """Value of a 4-bit code: sign, two bits of exponent (bias 1), one of mantissa; up to ±6, no NaN."""
    return _minifloat(code, exponent_bits=2, mantissa_bits=1, bias=1)


def e4m3(code: int) -> float:
    """Value of an FP8 E4M3FN code: bias 7, up to ±448, 0x7F and 0xFF are NaN, no infinities."""
    return math.nan if code & 0x7F == 0x7F else _minifloat(code, exponent_bits=4, mantissa_bits=3, bias=7)


def e5m2(code: int) -> float:
    """Value of an FP8 E5M2 code: bias 15, infinities and NaN as in IEEE 754."""
    if code & 0x7C == 0x7C:
        return math.nan if code & 3 else math.copysign(math.inf, -1 if code & 0x80 else 1)
    return _minifloat(code, exponent_bits=5, mantissa_bits=2, bias=15)


def e8m0(code: int) -> float:
    """Value of a scale code: 2 to the power of `code - 127`; 255 is NaN, there is no zero."""
    return math.nan if code == 255 else 2.0 ** (code - 127)


def _minifloat(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    mantissa = code & (1 << mantissa_bits) - 1
    exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
    sign = -1.0 if code >> mantissa_bits + exponent_bits & 1 else 1.0
    if exponent == 0:
        return sign * math.ldexp(mantissa, 1 - bias - mantissa_bits)
    return sign * math.ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits)


E2M1 = np.array([e2m1(code) for code in range(16)], np.float32)
E4M3 = np.array([e4m3(code) for code in range(256)], np.float32)
E5M2 = np.array([e5m2(code) for code in range(256)], np.float32)
E8M0 = np.array([e8m0(code) for code in range(256)], np.float32)
"""Values by code."""
