"""Products of a layer in one launch give the bits of one launch each."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from arriero.kernels.cuda import layer, stream
from arriero.kernels.cuda.gpu import Gpu
from arriero.kernels.cuda.product import Norm, multiply
from tests.helpers.cuda import gpu, packed, rows

__all__ = ["gpu"]

HIDDEN, INNER, HEADS, WIDTH = 256, 512, 384, 512


def gain(width: int = HIDDEN) -> Norm:
    return mx.random.uniform(0.5, 1.5, (width,)).astype(mx.bfloat16), 1e-6


def without_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "takes", lambda *_: False)


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


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("whole", [False, True])
def test_weights_that_pass_through_shared_memory_give_the_same_bits(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, whole: bool, count: int
) -> None:
    wide = stream.SHARE
    gate_up, down, o, q = (
        packed(shape, "nvfp4", 4, 16, global_scale=mx.array(0.5), deviation=0.03).operand
        for shape in ((2 * wide, wide), (wide, wide), (wide, wide), (16 * 7, wide))
    )
    first, second = gain(wide), gain(wide)
    chain = (
        layer.Chain(gate_up, down, "silu", first, o, q, second) if whole else layer.Chain(gate_up, down, "silu", first)
    )
    assert layer.streams(gpu, chain, count)
    h, y = rows(count, wide), rows(count, wide)
    made = [layer.multiply(gpu, h, y, chain) for _ in range(2)]
    without_streams(monkeypatch)
    assert not layer.streams(gpu, chain, count)
    plain = layer.multiply(gpu, h, y, chain)
    for one in made:
        assert mx.array_equal(one.h, plain.h)
        if whole:
            assert one.qkv is not None
            assert plain.qkv is not None
            assert mx.array_equal(one.qkv, plain.qkv)


SHAPES = [((48, 4096), 1), ((144, 8192), 1), ((32, 12288), 3), ((96, 12288), 8), ((16, 16384), 4)]
"""Of W, and how many rows of x."""


@pytest.mark.parametrize(
    ("shape", "count", "how"),
    [
        *((shape, count, how) for shape, count in SHAPES for how in ("plain", "normed")),
        *((shape, count, "gated") for shape, count in SHAPES if shape[0] % 32 == 0),
    ],
)
def test_a_product_whose_weights_pass_through_shared_memory_gives_the_same_bits(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], count: int, how: str
) -> None:
    matrix = packed(shape, "nvfp4", 4, 16, global_scale=mx.array(0.5), deviation=0.03).operand
    x = rows(count, shape[1])
    bringing: dict[str, Any] = {"residual": rows(count, shape[0])}
    if how == "normed":
        bringing = {"norm": gain(shape[1])}
    elif how == "gated":
        bringing = {"branch": rows(count, shape[1]), "norm": gain(shape[1]), "activation": "gelu_tanh"}
    made = multiply(gpu, x, matrix, **bringing)
    without_streams(monkeypatch)
    plain = multiply(gpu, x, matrix, **bringing)
    assert mx.array_equal(made.y, plain.y)
    assert mx.array_equal(made.x, plain.x)
