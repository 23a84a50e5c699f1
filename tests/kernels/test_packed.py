"""Matrices repacked for the CPU kernels: the same numbers, and a row of the same bits in any company."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from arriero.kernels import device
from arriero.kernels.embedding import dequantize, take_packed_rows
from arriero.kernels.gather_matmul import gather_packed_matmul
from arriero.kernels.packed import Packed, pack
from arriero.kernels.quantized_matmul import packed_matmul
from arriero.model.weight import Quantization, Weight
from tests.helpers import memory_checkpoint

pytestmark = pytest.mark.skipif(device.native() is None, reason="arriero-cpu is not installed, or there is a GPU")

FORMATS = [
    *(Quantization("affine", bits, size) for bits in (2, 3, 4, 5, 6, 8) for size in (32, 64, 128)),
    Quantization("nvfp4", 4, 16),
    Quantization("mxfp4", 4, 32),
]
FLOATS = [mx.float32, mx.bfloat16, mx.float16]
TOLERANCE = {mx.float32: 2e-5, mx.bfloat16: 6e-3, mx.float16: 2e-3}


def random(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def quantize(how: Quantization, *shape: int, scales: mx.Dtype | None = None) -> Weight:
    return memory_checkpoint.quantize(random(*shape, seed=1), how, scales)


def packed(w: Weight) -> Packed:
    assert w.quantization is not None
    assert w.scales is not None
    how = w.quantization
    found = pack(w.data, w.scales, w.biases, group_size=how.group_size, bits=how.bits, mode=how.mode)
    assert found is not None
    return found


def numbers(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def near(found: mx.array, expected: np.ndarray, dtype: mx.Dtype) -> None:
    assert found.dtype == dtype
    assert found.shape == expected.shape
    norm = np.abs(expected).max()
    np.testing.assert_allclose(numbers(found), expected, atol=TOLERANCE[dtype] * norm, rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("how", FORMATS, ids=lambda f: f"{f.name}-{f.group_size}")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_a_product_is_that_with_the_decoded_matrix(how: Quantization, dtype: mx.Dtype, rows: int) -> None:
    x, w = random(rows, 256).astype(dtype), quantize(how, 37, 256)
    near(packed_matmul(x, packed(w)), numbers(x) @ numbers(memory_checkpoint.dequantize(w)).T, dtype)


@pytest.mark.parametrize("how", FORMATS, ids=lambda f: f"{f.name}-{f.group_size}")
def test_a_matrix_knows_its_size(how: Quantization) -> None:
    matrix, bank = packed(quantize(how, 37, 256)), packed(quantize(how, 3, 37, 256))
    assert (matrix.experts, matrix.rows, matrix.columns) == (0, 37, 256)
    assert (bank.experts, bank.rows, bank.columns) == (3, 37, 256)
    # Sixteen columns make a strip, so 48 are held; memory comes in pages.
    assert bank.nbytes > 3 * 48 * 256 * how.bits / 8
    assert bank.nbytes <= sum(array.nbytes for array in bank.arrays) <= bank.nbytes + 8192


@pytest.mark.parametrize("how", FORMATS, ids=lambda f: f"{f.name}-{f.group_size}")
@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_of_a_table_are_those_of_the_original(how: Quantization, dtype: mx.Dtype) -> None:
    w = quantize(how, 37, 256)
    ids = mx.array([36, 0, 5, 5], mx.int32)
    assert w.scales is not None
    values = dequantize(w.data, w.scales, w.biases, group_size=how.group_size, bits=how.bits, mode=how.mode)
    near(take_packed_rows(packed(w), ids, dtype=dtype), numbers(values[ids]), dtype)


@pytest.mark.parametrize("how", [FORMATS[6], FORMATS[15], FORMATS[18], FORMATS[19]], ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_row_has_the_same_bits_in_any_company(how: Quantization, dtype: mx.Dtype) -> None:
    x, matrix = random(70, 256).astype(dtype), packed(quantize(how, 40, 256))
    together = numbers(packed_matmul(x, matrix))
    for start, count in [(0, 1), (3, 1), (5, 2), (7, 7), (1, 33), (0, 64), (69, 1)]:
        alone = packed_matmul(x[start : start + count], matrix)
        np.testing.assert_array_equal(numbers(alone), together[start : start + count])


@pytest.mark.parametrize("how", [FORMATS[6], FORMATS[18]], ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_row_has_the_same_bits_through_experts_in_any_company(how: Quantization, dtype: mx.Dtype) -> None:
    x, w = random(50, 256).astype(dtype), quantize(how, 6, 40, 256)
    bank = packed(w)
    draws = np.random.default_rng(0)
    chosen = mx.array(np.stack([draws.permutation(6)[:2] for _ in range(50)]).astype(np.uint32))
    scales = 0.5 + mx.arange(6, dtype=mx.float32)
    together = gather_packed_matmul(x, bank, chosen, global_scale=scales)
    picked = (
        numbers(memory_checkpoint.dequantize(w))[np.array(chosen)] * np.array(scales)[np.array(chosen)][..., None, None]
    )
    near(together, np.einsum("ti,tkoi->tko", numbers(x), picked), dtype)
    for start, count in [(0, 1), (3, 2), (5, 30)]:
        part = slice(start, start + count)
        alone = gather_packed_matmul(x[part], bank, chosen[part], global_scale=scales)
        np.testing.assert_array_equal(numbers(alone), numbers(together)[part])


def test_a_global_scale_multiplies_before_the_rounding() -> None:
    x, w = (
        (1000 * random(3, 64)).astype(mx.float16),
        memory_checkpoint.quantize(100 * random(24, 64, seed=1), FORMATS[18]),
    )
    scale = mx.array(2.0**-8 / 3, mx.float32)
    expected = numbers(x) @ numbers(memory_checkpoint.dequantize(w)).T * scale.item()
    near(packed_matmul(x, packed(w), global_scale=scale), expected, mx.float16)


def test_formats_that_products_read_as_they_are_stay_so() -> None:
    w = quantize(Quantization("mxfp8", 8, 32), 8, 64)
    assert w.packed() is None
    assert w.data.shape == (8, 16)


def test_packing_is_left_out_without_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "cpu_extension", lambda: None)
    w = quantize(FORMATS[6], 8, 64)
    assert w.packed() is None
    assert len(w.arrays()) == 3


def test_a_packed_matrix_on_another_device_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = packed(quantize(FORMATS[6], 8, 64))
    monkeypatch.setattr(device, "on_cpu", lambda: False)
    with pytest.raises(RuntimeError, match="packed for the CPU kernels"):
        packed_matmul(random(1, 64), matrix)
