"""Products of a layer in one launch give the bits of one launch each."""

from __future__ import annotations

import mlx.core as mx
import pytest

from arriero.kernels.cuda import layer
from arriero.kernels.cuda.gpu import Gpu
from arriero.kernels.cuda.product import Norm, multiply
from tests.helpers.cuda import gpu, packed, rows

__all__ = ["gpu"]

HIDDEN, INNER, HEADS, WIDTH = 256, 512, 384, 512


def gain() -> Norm:
    return mx.random.uniform(0.5, 1.5, (HIDDEN,)).astype(mx.bfloat16), 1e-6


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize(("out", "qkv"), [(False, False), (True, True), (True, False)])
@pytest.mark.parametrize("mode", [("nvfp4", 4, 16), ("mxfp8", 8, 32), ("affine", 4, 64)])
def test_one_launch_gives_the_bits_of_several(
    gpu: Gpu, mode: tuple[str, int, int], out: bool, qkv: bool, count: int
) -> None:
    scale = mx.array(0.5) if mode[0] == "nvfp4" else None
    gate_up, down, o, q = (
        packed(shape, *mode, global_scale=scale, deviation=0.05).operand
        for shape in ((2 * INNER, HIDDEN), (HIDDEN, INNER), (HIDDEN, HEADS), (WIDTH, HIDDEN))
    )
    first, second = gain(), gain()
    chain = layer.Chain(gate_up, down, "silu", first, o if out else None, q if qkv else None, second if qkv else None)
    assert layer.fits(gpu, chain, count)
    h, y = rows(count, HIDDEN), rows(count, HEADS if out else HIDDEN)
    branch = multiply(gpu, y, o).y if out else y
    inner = multiply(gpu, h, gate_up, branch=branch, norm=first, activation="silu")
    behind = multiply(gpu, inner.y, down, residual=inner.x).y
    for _ in range(2):
        made = layer.multiply(gpu, h, y, chain)
        assert mx.array_equal(made.h, behind)
        if qkv:
            assert made.qkv is not None
            assert mx.array_equal(made.qkv, multiply(gpu, behind, q, norm=second).y)
