"""Products of few rows on an NVIDIA GPU against float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from arriero.kernels.cuda import dequantize, experts
from arriero.kernels.cuda.formats import FORMATS
from arriero.kernels.cuda.gpu import Gpu
from arriero.kernels.cuda.product import Activation, fits, multiply
from arriero.kernels.gather_matmul import gather_quantized_matmul
from arriero.kernels.gather_matmul import quantized_graph as gather_graph
from arriero.kernels.quantized_matmul import graph, quantized_matmul
from arriero.kernels.topk import argmax, argmax_graph
from tests.helpers.cuda import error, exact, gpu, packed, rows

__all__ = ["gpu"]

TOLERANCE = 5e-3
EPS = 1e-6
EVERY = sorted(FORMATS)


def normed(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
    made: np.ndarray = x / np.sqrt((x**2).mean(1, keepdims=True) + EPS) * gain
    return made


def activated(activation: Activation, gate: np.ndarray) -> np.ndarray:
    made: np.ndarray
    if activation == "silu":
        made = gate / (1 + np.exp(-gate))
    elif activation == "gelu_tanh":
        made = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    else:
        made = 0.5 * gate * (1 + exact(mx.erf(mx.array((gate / np.sqrt(2)).astype(np.float32)))))
    return made


@pytest.mark.parametrize("mode", EVERY)
@pytest.mark.parametrize(("out", "width", "count"), [(4096, 4096, 1), (528, 1920, 7), (64, 256, 13)])
def test_a_product_of_few_rows_is_that_of_float64(
    gpu: Gpu, mode: tuple[str, int, int], out: int, width: int, count: int
) -> None:
    matrix = packed((out, width), *mode)
    x = rows(count, width)
    assert fits(matrix.operand, gpu, count)
    assert error(multiply(gpu, x, matrix.operand).y, exact(x) @ matrix.values.T) < TOLERANCE


# What NVFP4 holds without a global scale is not smaller than its least scale, 2^-9, which is subnormal.
@pytest.mark.parametrize(
    ("mode", "deviation"),
    [
        (("nvfp4", 4, 16), 0.004),
        (("nvfp4", 4, 16), 300.0),
        (("mxfp4", 4, 32), 1e-12),
        (("mxfp4", 4, 32), 1e9),
        (("mxfp8", 8, 32), 1e-12),
        (("mxfp8", 8, 32), 1e9),
    ],
)
def test_tiny_and_large_scales_are_exact(gpu: Gpu, mode: tuple[str, int, int], deviation: float) -> None:
    matrix = packed((256, 1024), *mode, deviation=deviation)
    x = rows(3, 1024)
    expected = exact(x) @ matrix.values.T
    assert np.linalg.norm(expected) > 0
    assert error(multiply(gpu, x, matrix.operand).y, expected) < TOLERANCE


@pytest.mark.parametrize("count", [1, 5, 8, 16, 29])
@pytest.mark.parametrize("wide", [False, True])
def test_norm_branch_factors_bias_and_residual_go_with_it(gpu: Gpu, count: int, wide: bool) -> None:
    out, width = 1040, 2048
    bias = rows(1, out)[0]
    scale = mx.array(0.37, mx.float32)
    matrix = packed((out, width), "nvfp4", 4, 16, deviation=1.0, global_scale=scale, bias=bias)
    x, branch, residual = rows(count, width, 3.0), rows(count, width), rows(count, out)
    gain = 1 + 0.2 * rows(1, width)[0].astype(mx.float32)
    gain = gain if wide else gain.astype(mx.bfloat16)
    made = multiply(gpu, x, matrix.operand, branch=branch, norm=(gain, EPS), residual=residual)
    total = exact((x.astype(mx.float32) + branch.astype(mx.float32)).astype(mx.bfloat16))
    assert error(made.x, total) == 0
    expected = normed(total, exact(gain)) @ matrix.values.T + exact(bias) + exact(residual)
    assert error(made.y, expected) < TOLERANCE


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize("count", [1, 6])
def test_gate_and_up_meet_in_one_launch(gpu: Gpu, activation: Activation, count: int) -> None:
    inner, width = 1536, 1024
    factors = mx.concatenate([mx.full((inner,), 0.5), mx.full((inner,), 1.25)])
    matrix = packed((2 * inner, width), "nvfp4", 4, 16, deviation=0.04, global_scale=factors)
    x = rows(count, width)
    gain = rows(1, width)[0] * 0.1 + 1
    made = multiply(gpu, x, matrix.operand, norm=(gain, EPS), activation=activation)
    both = normed(exact(x), exact(gain)) @ matrix.values.T
    assert error(made.y, activated(activation, both[:, :inner]) * both[:, inner:]) < TOLERANCE


def test_rows_too_long_for_shared_memory_go_by_several_launches(gpu: Gpu) -> None:
    matrix = packed((256, 25600), "nvfp4", 4, 16)
    x, residual = rows(9, 25600), rows(9, 256)
    made = multiply(gpu, x, matrix.operand, residual=residual)
    assert error(made.y, exact(x) @ matrix.values.T + exact(residual)) < TOLERANCE


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("width", [5120, 5376, 17408])
def test_rows_whose_units_sixteen_warps_share_unevenly(gpu: Gpu, width: int, count: int) -> None:
    matrix, x = packed((48, width), "nvfp4", 4, 16), rows(count, width)
    gain = 1 + 0.2 * rows(1, width)[0]
    y = multiply(gpu, x, matrix.operand, norm=(gain, EPS)).y
    assert error(y, normed(exact(x), exact(gain)) @ matrix.values.T) < TOLERANCE
    assert mx.array_equal(multiply(gpu, x[-1:], matrix.operand, norm=(gain, EPS)).y, y[-1:])


def test_a_row_has_the_same_bits_alone_and_beside_others(gpu: Gpu) -> None:
    matrix = packed((4096, 4096), "nvfp4", 4, 16)
    x = rows(16, 4096)
    together = multiply(gpu, x, matrix.operand).y
    for start, count in [(0, 1), (5, 1), (0, 8), (3, 8)]:
        part = multiply(gpu, x[start : start + count], matrix.operand).y
        assert mx.array_equal(part, together[start : start + count])


def test_zeros_give_zeros(gpu: Gpu) -> None:
    matrix = packed((256, 1024), "nvfp4", 4, 16)
    made = multiply(gpu, mx.zeros((2, 1024), mx.bfloat16), matrix.operand, norm=(mx.ones((1024,), mx.bfloat16), EPS))
    assert not mx.any(made.y).item()


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("length", [1, 5, 8196, 151936])
def test_the_largest_of_each_row_is_the_graphs(gpu: Gpu, dtype: mx.Dtype, length: int) -> None:
    scores = mx.random.normal((3, length), key=mx.random.key(7)).astype(dtype)
    assert argmax(scores).tolist() == argmax_graph(scores).tolist()
    ties = mx.round(scores)
    assert argmax(ties).tolist() == argmax_graph(ties).tolist()


@pytest.mark.parametrize("mode", EVERY)
def test_decoding_a_matrix_is_mlxs(gpu: Gpu, mode: tuple[str, int, int]) -> None:
    matrix = packed((256, 4096), *mode)
    found = dequantize.dequantize(matrix.operand)
    assert error(found, matrix.values) < (2e-3 if mode[0] == "affine" else 1e-12)


@pytest.mark.parametrize("mode", EVERY)
@pytest.mark.parametrize("count", [4, 33, 700])
def test_products_of_any_number_of_rows_are_those_of_the_graph(
    gpu: Gpu, mode: tuple[str, int, int], count: int
) -> None:
    scale = mx.array([0.5]) if mode[0] == "nvfp4" else None
    matrix = packed((512, 2048), *mode, global_scale=scale)
    x = rows(count, 2048)
    m = matrix.operand
    how = {"group_size": mode[2], "bits": mode[1], "mode": mode[0], "global_scale": scale}
    ours = quantized_matmul(x, m.w, m.scales, m.biases, **how)  # type: ignore[arg-type]
    assert ours.dtype == mx.bfloat16
    assert error(ours, exact(x) @ matrix.values.T) < TOLERANCE
    assert error(ours, exact(graph(x, m.w, m.scales, m.biases, **how))) < TOLERANCE  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", [("nvfp4", 4, 16), ("mxfp8", 8, 32), ("affine", 4, 64), ("mxfp4", 4, 32)])
@pytest.mark.parametrize(("out", "width", "count", "top"), [(1536, 2048, 1, 8), (2048, 768, 3, 6), (96, 256, 16, 4)])
def test_experts_multiply_the_rows_that_chose_them(
    gpu: Gpu, mode: tuple[str, int, int], out: int, width: int, count: int, top: int
) -> None:
    number = 12
    scales = mx.array(np.linspace(0.5, 2, number).astype(np.float32)) if mode[0] == "nvfp4" else None
    bank = packed((number, out, width), *mode, global_scale=scales)
    x = rows(count, width)
    chosen = np.stack([np.random.default_rng(i).permutation(number)[:top] for i in range(count)]).astype(np.uint32)
    indices = mx.array(chosen)
    assert experts.fits(gpu, x, bank.operand, indices)
    expected = np.einsum("rk,rjok->rjo", exact(x), bank.values[chosen])
    m = bank.operand
    how = {"group_size": mode[2], "bits": mode[1], "mode": mode[0], "global_scale": scales}
    ours = gather_quantized_matmul(x, m.w, m.scales, m.biases, indices=indices, **how)  # type: ignore[arg-type]
    assert error(ours, expected) < TOLERANCE
    flat = mx.array(chosen.reshape(-1))
    spread = mx.repeat(x, top, axis=0)
    single = gather_quantized_matmul(spread, m.w, m.scales, m.biases, indices=flat, **how)  # type: ignore[arg-type]
    assert error(single, expected.reshape(count * top, out)) < TOLERANCE
    plain = gather_graph(x, m.w, m.scales, m.biases, indices=indices, **how)  # type: ignore[arg-type]
    assert error(ours, exact(plain)) < TOLERANCE


def test_gate_and_up_of_experts_meet_in_one_launch(gpu: Gpu) -> None:
    inner, width = 768, 2048
    bank = packed((8, 2 * inner, width), "nvfp4", 4, 16)
    x, chosen = rows(4, width), np.array([[0, 7], [3, 3], [1, 2], [6, 5]], np.uint32)
    both = np.einsum("rk,rjok->rjo", exact(x), bank.values[chosen])
    ours = experts.multiply(gpu, x, bank.operand, mx.array(chosen), activation="silu")
    assert error(ours, activated("silu", both[..., :inner]) * both[..., inner:]) < TOLERANCE
