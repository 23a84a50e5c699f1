"""The Metal argmax against plain MLX."""

from __future__ import annotations

from collections import Counter

import mlx.core as mx
import pytest

from arriero.kernels import topk
from arriero.kernels.metal import argmax as metal
from tests.metal.launches import ORDERS, caught, emulated, faulty, launch, runnable
from tests.metal.test_topk import scores
from tests.metal.turned_on import calls

__all__ = ["calls"]

pytestmark = runnable


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "length"), [(1, 1), (3, 7), (2, 33), (2, 1024), (1, 4500)])
def test_the_first_of_the_largest_is_found(dtype: mx.Dtype, rows: int, length: int) -> None:
    for x in (scores(rows, length, dtype), mx.zeros((rows, length), dtype), -scores(rows, length, dtype)):
        for order in ORDERS:
            assert mx.array_equal(metal.argmax(x, launch=launch("argmax", **order)), topk.argmax_graph(x))


@pytest.mark.parametrize("value", [float("nan"), -float("nan"), -float("inf")])
def test_rows_without_a_number_have_their_first(value: float) -> None:
    x = mx.full((2, 3, 40), value)
    made = metal.argmax(x, launch=launch("argmax", **ORDERS[0]))
    assert made.shape == (2, 3)
    assert not bool(mx.any(made))
    x[1, 2, 17] = -3e38
    assert metal.argmax(x, launch=launch("argmax", **ORDERS[0]))[1, 2].item() == 17


def test_the_operation_takes_the_kernel_where_it_may(calls: Counter[str]) -> None:
    x = scores(2, 50, mx.bfloat16)
    assert mx.array_equal(topk.argmax(x), topk.argmax_graph(x))
    assert calls == {"argmax": 1}


@emulated
@pytest.mark.parametrize(
    ("edit", "kinds"),
    [
        (("  threadgroup_barrier(mem_flags::mem_threadgroup);\n", ""), ("race", "uninitialised")),
        (("i < length;", "i <= length;"), ("out-of-bounds",)),
        (("if (lane == 0) out", "out"), ("race",)),
        (("uint keys[NT / 32]", "uint keys[NT / 32 - 1]"), ("array-bounds", "out-of-bounds")),
        (("out[row]", "out[row / 2]"), ("race",)),
    ],
    ids=["no barrier", "a score too many", "all lanes write", "an array too small", "two rows in one place"],
)
def test_planted_faults_are_caught(edit: tuple[str, str], kinds: tuple[str, ...]) -> None:
    kernel, x = faulty("argmax", edit), scores(2, 1100, mx.float32)
    caught(kinds, lambda seed: metal.argmax(x, launch=lambda **call: kernel(**call, seed=seed)))
