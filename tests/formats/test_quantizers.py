"""Numbers into small formats: against one-value-at-a-time references, on every code and between all of them."""

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arriero.formats import affine, codes, mxfp, nvfp4
from arriero.formats.small_float import E2M1_FLOAT, E4M3_FLOAT

FORMATS = [(E2M1_FLOAT, codes.e2m1, 16), (E4M3_FLOAT, codes.e4m3, 256)]


def nearest_code(value: float, decode, count: int) -> int:
    """The code of the nearest value, of two the even one, by looking at all of them."""
    sign = count // 2 if math.copysign(1, value) < 0 else 0
    known = [code for code in range(count // 2) if not math.isnan(decode(code))]
    return sign + min(known, key=lambda code: (abs(decode(code) - abs(value)), code % 2))


@pytest.mark.parametrize(("kind", "decode", "count"), FORMATS, ids=["e2m1", "e4m3"])
def test_every_code_and_everything_around_and_between_two_is_rounded_as_by_the_reference(kind, decode, count):
    known = np.array(sorted({decode(code) for code in range(count) if not math.isnan(decode(code))}), np.float32)
    middles = (known[1:] + known[:-1]) / 2
    found = np.concatenate([known, -known, middles, [-0.0, 1e-30, -1e-30, 1e9, -1e9]]).astype(np.float32)
    found = np.concatenate([found, np.nextafter(found, np.float32(np.inf)), np.nextafter(found, np.float32(-np.inf))])
    expected = [nearest_code(float(value), decode, count) for value in found]
    assert kind.encode(kind.nearest(found), found).tolist() == expected


def relative(got, values):
    return float(np.sqrt(np.square(got - values).sum() / np.square(values).sum()))


NORMAL = np.random.default_rng(0).normal(0, 0.02, (64, 512)).astype(np.float32)


@pytest.mark.parametrize(("bits", "bound"), [(4, 0.120), (8, 0.027)])
def test_mx_errors_stay_below_their_bounds_and_a_search_never_adds_any(bits, bound):
    errors = []
    for search in (False, True):
        found, scales = mxfp.quantize(NORMAL, bits, search=search)
        errors.append(relative(mxfp.dequantize(affine.pack(found, bits), scales, bits), NORMAL))
    assert errors[1] <= errors[0] < bound
    if bits == 4:
        assert errors[1] < 0.95 * errors[0]


def test_a_search_takes_a_seventh_of_the_error_of_nvfp4():
    multiplier = nvfp4.multiplier_for(float(np.abs(NORMAL).max()))
    errors = []
    for search in (False, True):
        found, scales = nvfp4.quantize(NORMAL, multiplier, search=search)
        errors.append(relative(nvfp4.dequantize(affine.pack(found, 4), scales, multiplier), NORMAL))
    assert errors[1] < 0.87 * errors[0] < 0.087


@pytest.mark.parametrize(("bits", "bound"), [(4, 0.10), (8, 0.006)])
def test_affine_errors_stay_below_their_bounds_and_mlx_decodes_the_same(bits, bound):
    groups = NORMAL.reshape(64, -1, 64)
    scales, biases = affine.fit(groups, bits)
    packed = affine.pack(affine.encode(groups, scales, biases, bits).reshape(NORMAL.shape), bits)
    got = affine.dequantize(packed, scales, biases, 64, bits)
    assert relative(got, NORMAL) < bound
    theirs = mx.dequantize(mx.array(packed), mx.array(scales), mx.array(biases), group_size=64, bits=bits)
    np.testing.assert_allclose(got, np.array(theirs), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("bits", [4, 8])
def test_affine_scales_are_those_of_mlx(bits):
    scales, biases = affine.fit(NORMAL.reshape(64, -1, 64), bits)
    _, theirs, zeros = mx.quantize(mx.array(NORMAL), group_size=64, bits=bits)
    np.testing.assert_allclose(scales, np.array(theirs), rtol=1e-6)
    np.testing.assert_allclose(biases, np.array(zeros), rtol=1e-6)
    assert (scales < 0).any()
    assert (scales > 0).any()


@pytest.mark.parametrize(("bits", "limit"), [(4, 6.0), (8, 448.0)])
@pytest.mark.parametrize("power", [-100, -7, 0, 5, 90])
def test_without_a_search_an_mx_scale_is_the_least_that_clips_nothing(bits, limit, power):
    largest = np.float32(math.ldexp(limit, power))
    for value, code in ((largest, 127 + power), (np.nextafter(largest, np.float32(np.inf)), 128 + power)):
        _, scales = mxfp.quantize(np.full((1, 32), value, np.float32), bits, search=False)
        assert scales.tolist() == [[code]]


@pytest.mark.parametrize(("bits", "size"), [(4, 6.0), (8, 448.0)])
def test_without_a_search_no_mx_scale_clips_its_group(bits, size):
    rng = np.random.default_rng(1)
    values = (rng.normal(0, 1, (200, 32)) * 2.0 ** rng.integers(-40, 40, (200, 1))).astype(np.float32)
    _, scales = mxfp.quantize(values, bits, search=False)
    steps = codes.E8M0[scales[:, 0]].astype(np.float64)
    largest = np.abs(values).max(axis=1)
    assert (largest <= size * steps).all()
    assert (largest > size * steps / 2).all()


def coded(kind: str, values: np.ndarray) -> np.ndarray:
    if kind == "nvfp4":
        multiplier = nvfp4.multiplier_for(float(np.abs(values).max()))
        found, scales = nvfp4.quantize(values, multiplier)
        return nvfp4.dequantize(affine.pack(found, 4), scales, multiplier)
    bits = int(kind[-1])
    found, scales = mxfp.quantize(values, bits)
    return mxfp.dequantize(affine.pack(found, bits), scales, bits)


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "mxfp8"])
@pytest.mark.parametrize("special", ["zeros", "one huge", "denormal", "negative zero"])
def test_odd_groups_stay_finite_and_no_number_grows_beyond_its_group(kind, special):
    values = np.zeros((1, 64), np.float32)
    if special == "one huge":
        values[0, 3], values[0, 40:] = 3e30, 1.0
    elif special == "denormal":
        values[0] = np.float32(1e-41)
    elif special == "negative zero":
        values[0] = -0.0
    got = coded(kind, values)
    assert np.isfinite(got).all()
    assert np.abs(got).max() <= 1.34 * np.abs(values).max()
    if special == "negative zero":
        assert np.signbit(got).all()


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["nvfp4", "mxfp4", "mxfp8"]),
    st.lists(st.floats(-64, 64, width=32), min_size=32, max_size=32),
    st.integers(-20, 20),
)
def test_what_was_coded_once_is_coded_again_without_loss(kind, numbers, power):
    values = np.array([numbers], np.float32) * np.float32(2.0**power)
    once = coded(kind, values)
    if kind == "nvfp4":
        # The multiplier follows the largest number, so it moves; the error of a second time stays within a rounding.
        assert relative(coded(kind, once), once) < 0.06 if once.any() else not coded(kind, once).any()
    else:
        np.testing.assert_array_equal(coded(kind, once), once)
