"""Every code of every number format, decoded one by one as its definition says, with nothing but Python's numbers."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest

from arriero.formats import affine, blockfp8, codes, mxfp, nvfp4


def small_float(code: int, exponent_bits: int, mantissa_bits: int, *, infinities: bool) -> float:
    """Sign, exponent, mantissa: IEEE 754 with fewer bits; without infinities only all ones are no number."""
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) & 1 else 1.0
    exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = code & (1 << mantissa_bits) - 1
    bias, top, ones = (1 << exponent_bits - 1) - 1, (1 << exponent_bits) - 1, (1 << mantissa_bits) - 1
    if infinities and exponent == top:
        return math.nan if mantissa else sign * math.inf
    if not infinities and exponent_bits > 2 and exponent == top and mantissa == ones:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


def e2m1(code: int) -> float:
    return small_float(code, 2, 1, infinities=False)


def e4m3(code: int) -> float:
    return small_float(code, 4, 3, infinities=False)


def e8m0(code: int) -> float:
    return math.nan if code == 255 else 2.0 ** (code - 127)


def float32(value: float) -> float:
    """Rounded as an array stores it."""
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def same(found: np.ndarray, wanted: list[float]) -> bool:
    """Equal to the last bit and the sign of zero; what is no number is none."""
    return all(
        (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
        for a, b in zip(found.reshape(-1).tolist(), wanted, strict=True)
    )


@pytest.mark.parametrize(
    ("table", "decode"),
    [
        (codes.E2M1, e2m1),
        (codes.E4M3, e4m3),
        (codes.E5M2, lambda code: small_float(code, 5, 2, infinities=True)),
        (codes.E8M0, e8m0),
    ],
    ids=["e2m1", "e4m3", "e5m2", "e8m0"],
)
def test_every_code_of_a_table_is_what_its_bits_say(table, decode) -> None:
    assert same(table, [float32(decode(code)) for code in range(len(table))])


def test_every_nvfp4_code_under_every_scale_and_some_factors() -> None:
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 2, axis=1)
    packed = np.tile(affine.pack(np.tile(np.arange(16, dtype=np.uint8), 2)[None], 4), (256, 1))
    for factor in (1.0, 0.25, float32(3e-4)):
        wanted = [
            float32(float32(e2m1(code % 16) * e4m3(scale)) * factor) for scale in range(256) for code in range(32)
        ]
        assert same(nvfp4.dequantize(packed, scales, factor), wanted)


@pytest.mark.parametrize(("bits", "decode"), [(4, e2m1), (8, e4m3)])
def test_every_mx_code_under_every_exponent(bits: int, decode) -> None:
    count = 1 << bits
    every = np.resize(np.arange(count, dtype=np.uint8), max(32, count))
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], len(every) // 32, axis=1)
    packed = np.tile(affine.pack(every[None], bits), (256, 1))
    wanted = [float32(decode(code) * e8m0(scale)) for scale in range(256) for code in every.tolist()]
    assert same(mxfp.dequantize(packed, scales, bits), wanted)


def test_every_fp8_code_under_the_scale_of_its_block() -> None:
    rows, columns = 130, 256
    found = np.tile(np.arange(256, dtype=np.uint8), (rows, 1))
    scales = np.array([[0.5, 3e-3], [-2.0, 1e-30]], np.float32)
    wanted = [
        float32(e4m3(column) * float(scales[row // 128, column // 128]))
        for row in range(rows)
        for column in range(columns)
    ]
    assert same(blockfp8.dequantize(found, scales), wanted)


@pytest.mark.parametrize("bits", affine.BITS)
def test_every_affine_code_is_its_number_of_steps_from_the_bias(bits: int) -> None:
    every = np.resize(np.arange(1 << bits, dtype=np.uint8), max(64, 1 << bits))
    groups = len(every) // 64
    scales, biases = (np.linspace(a, b, groups, dtype=np.float32)[None] for a, b in ((0.25, 2.0), (-8.0, 3.0)))
    wanted = [
        float32(float32(code * float(scales[0, at // 64])) + float(biases[0, at // 64]))
        for at, code in enumerate(every.tolist())
    ]
    assert same(affine.dequantize(affine.pack(every[None], bits), scales, biases, 64, bits), wanted)


@pytest.mark.parametrize("bits", affine.BITS)
def test_codes_lie_in_words_from_the_lowest_bit_on(bits: int) -> None:
    every = np.resize(np.random.default_rng(bits).permutation(1 << bits), 64).astype(np.uint8)
    stream = sum(int(code) << bits * at for at, code in enumerate(every))
    words = [stream >> 32 * at & 0xFFFFFFFF for at in range(64 * bits // 32)]
    assert affine.pack(every[None], bits).tolist() == [words]


def test_fp8_under_any_scale_loses_less_than_a_twentieth_of_the_largest_as_mxfp8() -> None:
    rng = np.random.default_rng(0)
    for scale in (0.003, 0.9, 1.1):
        values = codes.E4M3[rng.choice([c for c in range(256) if c & 0x7F != 0x7F], (64, 128))] * np.float32(scale)
        found, scales = mxfp.quantize(values, 8)
        missed = np.abs(mxfp.dequantize(affine.pack(found, 8), scales, 8) - values)
        assert missed.max() < 0.049 * np.abs(values).max()
