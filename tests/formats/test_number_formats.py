"""Scalar references of the number formats against MLX, on every code."""

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest

from arriero.formats import affine, codes, mxfp, nvfp4


@pytest.mark.parametrize(
    ("table", "dtype"),
    [
        (codes.E4M3, ml_dtypes.float8_e4m3fn),
        (codes.E5M2, ml_dtypes.float8_e5m2),
        (codes.E8M0, ml_dtypes.float8_e8m0fnu),
    ],
)
def test_every_8_bit_code_has_the_value_of_its_standard(table, dtype):
    expected = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    np.testing.assert_array_equal(table, expected)


def test_every_e2m1_code_has_the_value_of_its_standard():
    assert codes.E2M1.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert np.signbit(codes.E2M1[8])


def test_nvfp4_decodes_every_code_under_every_scale_as_mlx():
    scales = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    packed = np.tile(affine.pack(np.tile(np.arange(16, dtype=np.uint8), 2)[None], 4), (len(scales), 1))
    pairs = np.repeat(scales[:, None], 2, axis=1)
    theirs = mx.dequantize(mx.array(packed), mx.array(pairs), group_size=16, bits=4, mode="nvfp4", dtype=mx.float32)
    np.testing.assert_array_equal(nvfp4.dequantize(packed, pairs), np.array(theirs))


def test_a_multiplier_times_the_largest_product_is_mlx_global_scale():
    packed = affine.pack(np.tile(np.arange(16, dtype=np.uint8), 2)[None], 4)
    scales = np.array([[0x38, 0x41]], np.uint8)
    theirs = mx.dequantize(
        mx.array(packed),
        mx.array(scales),
        group_size=16,
        bits=4,
        mode="nvfp4",
        dtype=mx.float32,
        global_scale=mx.array(0.25 * nvfp4.LARGEST),
    )
    np.testing.assert_allclose(nvfp4.dequantize(packed, scales, 0.25), np.array(theirs), rtol=1e-6)


@pytest.mark.parametrize(("bits", "count"), [(4, 16), (8, 256)])
def test_mx_formats_decode_every_code_under_every_scale_as_mlx(bits, count):
    every = np.resize(np.arange(count, dtype=np.uint8), max(32, count))
    if bits == 8:
        every[every & 0x7F == 0x7F] = 0
    scales = np.arange(255, dtype=np.uint8)
    packed = np.tile(affine.pack(every[None], bits), (len(scales), 1))
    per_group = np.repeat(scales[:, None], len(every) // 32, axis=1)
    theirs = mx.dequantize(
        mx.array(packed), mx.array(per_group), group_size=32, bits=bits, mode=f"mxfp{bits}", dtype=mx.float32
    )
    np.testing.assert_array_equal(mxfp.dequantize(packed, per_group, bits), np.array(theirs))


@pytest.mark.parametrize("bits", affine.BITS)
def test_affine_codes_survive_packing_and_mlx_reads_the_same(bits):
    every = np.resize(np.random.default_rng(bits).permutation(1 << bits), (3, 256)).astype(np.uint8)
    packed = affine.pack(every, bits)
    np.testing.assert_array_equal(affine.unpack(packed, bits), every)
    ones = mx.ones((3, 4))
    theirs = mx.dequantize(mx.array(packed), ones, mx.zeros((3, 4)), group_size=64, bits=bits)
    np.testing.assert_array_equal(np.array(theirs), every.astype(np.float32))


@pytest.mark.parametrize("bits", affine.BITS)
@pytest.mark.parametrize("group_size", affine.GROUPS)
def test_affine_decodes_random_words_as_mlx(bits, group_size):
    rng = np.random.default_rng(group_size + bits)
    packed = rng.integers(0, 1 << 32, (5, 256 * bits // 32), dtype=np.uint32)
    scales, biases = rng.normal(size=(2, 5, 256 // group_size)).astype(np.float32)
    theirs = mx.dequantize(mx.array(packed), mx.array(scales), mx.array(biases), group_size=group_size, bits=bits)
    np.testing.assert_allclose(
        affine.dequantize(packed, scales, biases, group_size, bits), np.array(theirs), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("bits", affine.BITS)
def test_affine_quantising_is_off_by_at_most_half_a_step(bits):
    values = np.random.default_rng(bits).normal(size=(4, 128)).astype(np.float32)
    values[0, :32] = 0.75
    codes_, scales, biases = affine.quantize(values, 32, bits)
    back = affine.dequantize(affine.pack(codes_, bits), scales, biases, 32, bits)
    assert (np.abs(back - values) <= np.repeat(scales, 32, axis=-1) * 0.5001 + 1e-7).all()
    np.testing.assert_array_equal(back[0, :32], values[0, :32])


def test_rows_that_fill_no_whole_words_cannot_be_packed():
    with pytest.raises(ValueError, match="rows of 20 codes at 4 bits"):
        affine.pack(np.zeros((2, 20), np.uint8), 4)
