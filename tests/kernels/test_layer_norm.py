"""The norm by mean and variance, with plain MLX and with the CPU extension."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from arriero.kernels.layer_norm import layer_norm

pytestmark = pytest.mark.usefixtures("kernels")


def exact(x: mx.array, gain: mx.array, eps: float) -> np.ndarray:
    wide, scale = (np.array(array.astype(mx.float32), np.float64) for array in (x, gain))
    centred = wide - wide.mean(-1, keepdims=True)
    result: np.ndarray = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * scale
    return result


@pytest.mark.parametrize(("dtype", "tolerance"), [(mx.float32, 2e-5), (mx.bfloat16, 0.01), (mx.float16, 0.002)])
@pytest.mark.parametrize("shift", [0.0, 100.0])
def test_it_is_the_formula_in_float32(dtype: mx.Dtype, tolerance: float, shift: float) -> None:
    x = (mx.random.normal((7, 96), key=mx.random.key(1)) + shift).astype(dtype)
    gain = (1 + 0.3 * mx.random.normal((96,), key=mx.random.key(2))).astype(dtype)
    found = layer_norm(x, gain, 1e-5)
    assert found.dtype == dtype
    # A shift of 100 takes two digits from float32.
    bound = tolerance * (1 if shift == 0 else 10)
    np.testing.assert_allclose(np.array(found.astype(mx.float32)), exact(x, gain, 1e-5), rtol=bound, atol=bound)


def test_a_row_does_not_depend_on_its_company() -> None:
    x = mx.random.normal((33, 80), key=mx.random.key(3))
    gain = mx.random.normal((80,), key=mx.random.key(4))
    alone = [np.array(layer_norm(x[i : i + 1], gain, 1e-6)) for i in range(33)]
    np.testing.assert_array_equal(np.concatenate(alone), np.array(layer_norm(x, gain, 1e-6)))


def test_a_constant_row_is_nothing() -> None:
    found = layer_norm(mx.full((1, 16), 3.0), mx.ones(16), 1e-5)
    np.testing.assert_array_equal(np.array(found), np.zeros((1, 16)))
