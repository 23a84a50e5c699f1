"""Products of few rows with dense matrices on an NVIDIA GPU, against float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from arriero.kernels.cuda import dense
from arriero.kernels.cuda.gpu import Gpu
from tests.helpers.cuda import ON_GPU, error, exact, executed, rows

__all__ = ["executed"]


@pytest.mark.parametrize(
    ("count", "out", "columns", "normed", "biased", "wide"),
    [
        (1, 70, 296, True, True, False),
        pytest.param(2, 70, 296, False, False, False, marks=ON_GPU),
        pytest.param(2, 5120, 2880, True, True, True, marks=ON_GPU),
        pytest.param(1, 2880, 4096, False, True, False, marks=ON_GPU),
        pytest.param(2, 16384, 512, True, False, True, marks=ON_GPU),
    ],
)
def test_rows_are_normed_multiplied_and_shifted(
    executed: Gpu, count: int, out: int, columns: int, normed: bool, biased: bool, wide: bool
) -> None:
    x, w = rows(count, columns, 3.0), rows(out, columns, columns**-0.5)
    gain = (1 + 0.1 * rows(1, columns)[0].astype(mx.float32)).astype(mx.float32 if wide else mx.bfloat16)
    bias = rows(1, out)[0] if biased else None
    assert dense.fits(executed, x, w, bias)
    ours = dense.multiply(executed, x, w, norm=(gain, 1e-5) if normed else None, bias=bias)
    taken = exact(x)
    if normed:
        taken = taken / np.sqrt((taken**2).mean(1, keepdims=True) + 1e-5) * exact(gain)
    assert error(ours, taken @ exact(w).T + (0 if bias is None else exact(bias))) < 5e-3


def test_what_is_left_to_others(executed: Gpu) -> None:
    x, w = rows(2, 64), rows(32, 64)
    assert dense.fits(executed, x, w, None)
    assert not dense.fits(executed, rows(3, 64), w, None)
    assert not dense.fits(executed, x.astype(mx.float32), w, None)
    assert not dense.fits(executed, x, w, mx.zeros((32,)))
