"""The k largest on an NVIDIA GPU, to the index, against the order of plain MLX."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from arriero.kernels import topk
from arriero.kernels.cuda import topk as cuda
from arriero.kernels.cuda.gpu import Gpu
from tests.helpers.cuda import SEED, executed, gpu

__all__ = ["executed", "gpu"]

NAN, INF = float("nan"), float("inf")


def check(scores: mx.array, k: int) -> None:
    assert cuda.takes(scores, k)
    ours = topk.top_k(scores, k)
    assert ours.dtype == mx.int32
    assert np.array_equal(np.array(ours), np.array(topk.graph(scores, k)))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize(("rows", "length", "k"), [(3, 512, 10), (1, 40, 40), (2, 3000, 1), (1, 2049, 700), (2, 1, 1)])
def test_random_rows(gpu: Gpu, dtype: mx.Dtype, rows: int, length: int, k: int) -> None:
    # Numbers in bfloat16 are often equal.
    check(mx.array(SEED.normal(0, 1, (rows, length)).astype(np.float32)).astype(dtype), k)


@pytest.mark.parametrize("k", [1, 40, 2048])
def test_rows_of_several_pieces(gpu: Gpu, k: int) -> None:
    length = 2 * cuda.PIECE + 77
    scores = SEED.normal(0, 1, (2, length)).astype(np.float32)
    scores[1] = np.round(scores[1])
    check(mx.array(scores), k)


@pytest.mark.parametrize("k", [3, 9])
def test_equal_ones_infinities_and_what_is_no_number(executed: Gpu, k: int) -> None:
    rows = [
        [1.0, 7.0, NAN, 7.0, 3.0, -INF, 7.0, NAN, 7.0],
        [-INF] * 9,
        [NAN] * 9,
        [-0.0, 0.0, -1.0, 0.0, -0.0, 1e-40, INF, -INF, NAN],
        [5.0] * 9,
    ]
    for dtype in (mx.float32, mx.bfloat16):
        check(mx.array(rows).astype(dtype), k)


def test_all_equal_over_pieces(executed: Gpu) -> None:
    check(mx.zeros((1, cuda.PIECE + 40), mx.bfloat16), 60)


def test_axes_before_the_last_stay(gpu: Gpu) -> None:
    scores = mx.array(SEED.normal(0, 1, (2, 3, 70)).astype(np.float32))
    check(scores, 5)
    check(scores.swapaxes(0, 1), 5)


def test_what_the_kernel_does_not_take_is_left_to_plain_mlx(gpu: Gpu) -> None:
    assert not cuda.takes(mx.zeros((1, 9), mx.float16), 3)
    assert not cuda.takes(mx.zeros((1, 5000)), cuda.MOST + 1)
    assert not cuda.takes(mx.zeros((0, 5000)), 3)
    assert topk.top_k(mx.array([[1.0, 3.0, 2.0]], mx.float16), 2).tolist() == [[1, 2]]
