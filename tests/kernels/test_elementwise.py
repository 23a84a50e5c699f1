"""Norms, rotation, activations, table rows and the cache's append."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest

from arriero.kernels.activation import geglu, sigmoid_gate, softcap, swiglu
from arriero.kernels.append import append
from arriero.kernels.embedding import take_quantized_rows, take_rows
from arriero.kernels.rms_norm import add_rms_norm, rms_norm
from arriero.kernels.rope import rope
from arriero.model.weight import Quantization
from tests.helpers.memory_checkpoint import dequantize, quantize

pytestmark = pytest.mark.usefixtures("kernels")

FLOATS = [mx.float32, mx.bfloat16, mx.float16]
ULP = {mx.float32: 1e-6, mx.bfloat16: 2**-8, mx.float16: 2**-11}


def random(*shape: int, seed: int = 0, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def exact(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def close(found: mx.array, expected: np.ndarray, dtype: mx.Dtype) -> None:
    assert found.dtype == dtype
    np.testing.assert_allclose(exact(found), expected, rtol=2 * ULP[dtype], atol=2 * ULP[dtype])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("gain", [None, *FLOATS])
def test_rms_norm_keeps_the_dtype_of_its_input(dtype: mx.Dtype, gain: mx.Dtype | None) -> None:
    x = random(5, 48, dtype=dtype) * 3
    w = None if gain is None else 1 + 0.3 * random(48, seed=1, dtype=gain)
    expected = exact(x) / np.sqrt(np.mean(exact(x) ** 2, -1, keepdims=True) + 1e-5)
    found = rms_norm(x, w, 1e-5)
    assert found.dtype == dtype
    np.testing.assert_allclose(exact(found), expected * (1 if w is None else exact(w)), rtol=4 * ULP[dtype])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("gain", [None, *FLOATS])
def test_a_sum_and_its_norm_are_what_the_two_steps_give(dtype: mx.Dtype, gain: mx.Dtype | None) -> None:
    x, branch = random(5, 48, dtype=dtype), random(5, 48, seed=2, dtype=dtype)
    w = None if gain is None else 1 + 0.3 * random(48, seed=1, dtype=gain)
    total, normed = add_rms_norm(x, branch, w, 1e-5)
    assert total.dtype == normed.dtype == dtype
    np.testing.assert_array_equal(exact(total), exact(x + branch))
    np.testing.assert_allclose(exact(normed), exact(rms_norm(x + branch, w, 1e-5)), rtol=2 * ULP[dtype])


def test_a_branch_of_another_dtype_does_not_change_the_residual_s() -> None:
    x, branch = random(5, 48, dtype=mx.bfloat16), random(5, 48, seed=2)
    assert [a.dtype for a in add_rms_norm(x, branch, None, 1e-5)] == [mx.bfloat16, mx.bfloat16]


def table(tokens: int, half: int) -> mx.array:
    angles = np.random.default_rng(0).uniform(-9, 9, (tokens, half))
    return mx.array(np.stack([np.cos(angles), np.sin(angles)], -1).astype(np.float32))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("half", [8, 5])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_turns_pairs_and_leaves_the_rest(dtype: mx.Dtype, half: int, interleaved: bool) -> None:
    x, angles = random(6, 3, 16, dtype=dtype), table(6, half)
    turns = np.array(angles).astype(np.float64)
    expected = exact(x)
    for i in range(half):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        a, b = exact(x)[..., first], exact(x)[..., second]
        cos, sin = turns[:, None, i, 0], turns[:, None, i, 1]
        expected[..., first], expected[..., second] = a * cos - b * sin, b * cos + a * sin
    close(rope(x, angles, interleaved=interleaved), expected, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_swiglu_is_silu_of_gate_times_up(dtype: mx.Dtype) -> None:
    gate, up = 3 * random(5, 40, dtype=dtype), random(5, 40, seed=1, dtype=dtype)
    close(swiglu(gate, up), exact(gate) / (1 + np.exp(-exact(gate))) * exact(up), dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("tanh", [True, False])
def test_geglu_is_gelu_of_gate_times_up(dtype: mx.Dtype, tanh: bool) -> None:
    gate, up = 2 * random(5, 40, dtype=dtype), random(5, 40, seed=1, dtype=dtype)
    g = exact(gate)
    if tanh:
        inner = np.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))
    else:
        inner = np.vectorize(math.erf)(g / math.sqrt(2))
    close(geglu(gate, up, tanh=tanh), 0.5 * g * (1 + inner) * exact(up), dtype)


def test_activations_of_large_values_stay_finite() -> None:
    gate = mx.array([[-3e4, -100.0, 0.0, 100.0, 3e4]])
    for found in (swiglu(gate, mx.ones_like(gate)), geglu(gate, mx.ones_like(gate))):
        np.testing.assert_allclose(np.array(found), [[0, 0, 0, 100, 3e4]], atol=1e-6)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", [48, 1])
def test_sigmoid_gate_takes_a_gate_for_each_number_or_one_for_a_row(dtype: mx.Dtype, width: int) -> None:
    x, gate = random(5, 48, dtype=dtype), random(5, width, seed=1, dtype=dtype) * 20
    close(sigmoid_gate(x, gate), exact(x) / (1 + np.exp(-exact(gate))), dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_softcap_bounds_and_keeps_the_dtype(dtype: mx.Dtype) -> None:
    x = 20 * random(4, 9, dtype=dtype)
    found = softcap(x, 3.0)
    assert found.dtype == dtype
    np.testing.assert_allclose(exact(found), 3 * np.tanh(exact(x) / 3), atol=8 * ULP[dtype])


@pytest.mark.parametrize("start", [0, 3, 6])
def test_append_writes_its_tokens_and_no_others(start: int) -> None:
    buffer, update = random(1, 2, 8, 4), random(1, 2, 2, 4, seed=1)
    expected = np.array(buffer)
    expected[:, :, start : start + 2] = np.array(update)
    np.testing.assert_array_equal(np.array(append(buffer, update, start)), expected)


def test_append_casts_to_the_buffer() -> None:
    found = append(mx.zeros((1, 1, 4, 8), mx.bfloat16), random(1, 1, 1, 8), 2)
    assert found.dtype == mx.bfloat16
    assert mx.array_equal(found[:, :, 2:3], random(1, 1, 1, 8).astype(mx.bfloat16)).item()


@pytest.mark.parametrize("start", [-1, 7, 9])
def test_append_refuses_what_does_not_fit(start: int) -> None:
    with pytest.raises(ValueError, match="do not fit a buffer of 8"):
        append(mx.zeros((1, 1, 8, 4)), mx.zeros((1, 1, 2, 4)), start)


def test_rows_of_a_dense_table_take_the_asked_dtype() -> None:
    rows = random(10, 8)
    found = take_rows(rows, mx.array([9, 0, 9]), mx.bfloat16)
    assert found.dtype == mx.bfloat16
    assert mx.array_equal(found, rows[mx.array([9, 0, 9])].astype(mx.bfloat16)).item()


@pytest.mark.parametrize(
    "how",
    [Quantization("affine", 4, 32), Quantization("affine", 8, 64), Quantization("nvfp4", 4, 16)],
    ids=lambda f: f.name,
)
@pytest.mark.parametrize("scale", [None, mx.array(0.37), 1 + mx.arange(10, dtype=mx.float32)])
def test_rows_of_a_packed_table_are_rows_of_the_decoded_one(how: Quantization, scale: mx.array | None) -> None:
    packed = quantize(random(10, 64), how, mx.float16)
    assert packed.scales is not None
    ids = mx.array([3, 0, 9, 3])
    found = take_quantized_rows(
        packed.data,
        packed.scales,
        packed.biases,
        ids,
        group_size=how.group_size,
        bits=how.bits,
        mode=how.mode,
        dtype=mx.bfloat16,
        global_scale=scale,
    )
    whole = dequantize(packed)
    if scale is not None:
        whole = whole * (scale if scale.size == 1 else scale[:, None])
    assert found.dtype == mx.bfloat16
    assert mx.array_equal(found, whole[ids].astype(mx.bfloat16)).item()


def test_elementwise_rows_have_the_same_bits_in_any_company() -> None:
    x, y, angles = random(33, 3, 17), random(33, 3, 17, seed=1), table(33, 8)
    gain = random(17, seed=2)

    def everything(part: slice) -> list[np.ndarray]:
        flat = x[part].reshape(-1, 51), y[part].reshape(-1, 51)
        return [
            np.array(a)
            for a in (
                rms_norm(x[part], gain, 1e-6),
                *add_rms_norm(x[part], y[part], gain, 1e-6),
                rope(x[part], angles[part]),
                swiglu(*flat),
                geglu(*flat),
                geglu(*flat, tanh=False),
                softcap(x[part], 2.0),
                sigmoid_gate(*flat),
            )
        ]

    together = everything(slice(0, 33))
    for part in (slice(0, 1), slice(4, 7), slice(32, 33)):
        for alone, row in zip(everything(part), together, strict=True):
            np.testing.assert_array_equal(alone, row[part])
