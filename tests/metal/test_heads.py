"""Norm and rotation of heads on the Metal kernel against plain MLX in float32."""

from __future__ import annotations

from collections import Counter
from typing import Any

import mlx.core as mx
import pytest

from arriero.kernels import rope
from arriero.kernels.metal import heads as metal
from tests.metal.launches import ORDERS, apart, caught, emulated, faulty, launch, runnable
from tests.metal.turned_on import calls

__all__ = ["calls"]

pytestmark = runnable

LIMIT = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 5e-3}


def normal(*shape: int, seed: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def angles(tokens: int, turned: int) -> mx.array:
    turns = normal(tokens, turned // 2, seed=5) * 3
    return mx.stack([mx.cos(turns), mx.sin(turns)], axis=-1)


def want(x: mx.array, gain: mx.array | None, table: mx.array | None, interleaved: bool) -> mx.array:
    wide = x.astype(mx.float32)
    if gain is not None:
        wide = mx.fast.rms_norm(wide, gain.astype(mx.float32), 1e-5)
    return (wide if table is None else rope.graph(wide, table, interleaved=interleaved)).astype(x.dtype)


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize(
    ("tokens", "heads", "width", "turned", "gain", "interleaved"),
    [
        (1, 1, 2, 2, mx.float32, False),
        (3, 9, 64, 64, mx.float32, False),
        (2, 3, 80, 20, None, True),
        (4, 2, 128, 32, mx.bfloat16, False),
        (2, 5, 36, 0, mx.float32, False),
    ],
    ids=["two numbers", "whole heads", "pairs side by side", "a part of each head", "only the norm"],
)
def test_heads_are_those_of_plain_mlx(
    dtype: mx.Dtype, tokens: int, heads: int, width: int, turned: int, gain: mx.Dtype | None, interleaved: bool
) -> None:
    # Heads of a joined product: rows are wider than they.
    x = normal(tokens, heads * width + 16, seed=1, dtype=dtype)[:, 8:-8].reshape(tokens, heads, width)
    gains = None if gain is None else normal(width, seed=2, dtype=gain)
    table = angles(tokens, turned) if turned else None
    expected = want(x, gains, table, interleaved)
    norm = None if gains is None else (gains, 1e-5)
    assert metal.takes(x, norm, table)
    for order in ORDERS:
        made = metal.turned(x, norm, table, interleaved=interleaved, launch=launch("heads", **order))
        assert apart(made, expected) <= LIMIT[dtype]


def test_heads_of_a_sliced_row_are_read_where_they_lie() -> None:
    whole, table = normal(3, 12, 16, seed=1), angles(3, 16)
    part = whole[:, 4:9]
    for order in ORDERS:
        made = metal.turned(part, None, table, launch=launch("heads", **order))
        assert apart(made, want(part, None, table, False)) <= 1e-5


def test_the_operations_take_the_kernel_where_they_may(calls: Counter[str]) -> None:
    x, table, gain = normal(3, 4, 16, seed=1), angles(3, 16), normal(16, seed=2)
    assert apart(rope.rope(x, table, interleaved=True), want(x, None, table, True)) <= 1e-5
    assert apart(rope.normed_rope(x, (gain, 1e-5), table), want(x, gain, table, False)) <= 1e-5
    assert apart(rope.normed_rope(x, (gain, 1e-5), None), want(x, gain, None, False)) <= 1e-5
    assert calls == {"heads": 3}
    assert rope.normed_rope(x, None, None) is x


@emulated
@pytest.mark.parametrize(
    ("edit", "kinds"),
    [
        (("low ? d + HALF : d - HALF", "d + HALF"), ("out-of-bounds",)),
        (("* HALF + (INTERLEAVED", "* HALF + HALF + (INTERLEAVED"), ("out-of-bounds",)),
        (("threads_per_grid.y + head) * D", "threads_per_grid.y + head / 2) * D"), ("race",)),
        (("for (int d = lane; d < D; d += 32) {\n    float", "for (int d = lane; d < D - 1; d += 32) {\n    float"),
         ("unwritten-output",)),
        (("simd_sum(squares)", "simd_shuffle(squares, lane + 1)"), ("bad-lane",)),
    ],
    ids=["a pair too far", "an angle too far", "two heads in one place", "a number left out", "a lane too far"],
)  # fmt: skip
def test_planted_faults_are_caught(edit: tuple[str, str], kinds: tuple[str, ...]) -> None:
    kernel, x, table = faulty("heads", edit), normal(2, 3, 16, seed=1), angles(2, 16)
    norm: Any = (normal(16, seed=2), 1e-5)
    caught(kinds, lambda seed: metal.turned(x, norm, table, launch=lambda **call: kernel(**call, seed=seed)))
