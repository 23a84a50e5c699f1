"""Depthwise convolutions on an NVIDIA GPU against their graph version."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from arriero.kernels import depthwise_conv as module
from arriero.kernels.cuda.gpu import Gpu
from tests.helpers.bits import same
from tests.helpers.cuda import ON_GPU, SEED, error, exact, executed

__all__ = ["executed"]


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
@pytest.mark.parametrize(
    ("lengths", "stops", "taps", "dilation", "extras"),
    [
        ([19, 1, 4], [[2, 18], [], [1]], 4, 1, True),
        pytest.param([1] * 9, [[]] * 9, 4, 1, False, marks=ON_GPU),
        ([5], [[]], 3, 3, True),
    ],
)
def test_rows_and_tails_are_those_of_the_graph(
    executed: Gpu, dtype: mx.Dtype, lengths: list[int], stops: list[list[int]], taps: int, dilation: int, extras: bool
) -> None:
    def random(*shape: int) -> mx.array:
        return mx.array(SEED.normal(0, 1, shape).astype(np.float32)).astype(dtype)

    x, w, bias = random(sum(lengths), 70), random(taps, 70), random(70) if extras else None
    tails = [random((taps - 1) * dilation, 70) for _ in lengths]
    ours = module.depthwise_conv(x, w, bias, tails=tails, lengths=lengths, stops=stops, dilation=dilation, silu=extras)
    theirs = module.graph(x, w, bias, tails=tails, lengths=lengths, stops=stops, dilation=dilation, silu=extras)
    assert ours.y.dtype == dtype
    assert error(ours.y, exact(theirs.y)) < (1e-6 if dtype == mx.float32 else 1e-3)
    for i in range(len(lengths)):
        for a, b in zip([*ours.interior[i], ours.ends[i]], [*theirs.interior[i], theirs.ends[i]], strict=True):
            assert same(a, b)
