"""Products of few rows with small dense matrices on an NVIDIA GPU, against float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from arriero.kernels.cuda import dense
from arriero.kernels.cuda.gpu import Gpu
from tests.helpers.cuda import error, exact, executed, rows

__all__ = ["executed"]


@pytest.mark.parametrize(("count", "out", "width"), [(1, 20, 320), (11, 9, 2080), (3, 1, 64)])
@pytest.mark.parametrize("gain", [None, mx.bfloat16, mx.float32])
def test_a_product_with_the_norm_before_it(
    executed: Gpu, count: int, out: int, width: int, gain: mx.Dtype | None
) -> None:
    x, w = rows(count, width, 3.0), rows(out, width, 0.1)
    norm = None if gain is None else ((1 + 0.2 * rows(1, width)[0].astype(mx.float32)).astype(gain), 1e-5)
    assert dense.fits(executed, x, w)
    expected = exact(x)
    if norm is not None:
        expected = expected / np.sqrt((expected**2).mean(1, keepdims=True) + 1e-5) * exact(norm[0])
    assert error(dense.multiply(executed, x, w, norm), expected @ exact(w).T) < 5e-3
