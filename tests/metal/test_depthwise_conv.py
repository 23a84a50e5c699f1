"""The Metal depthwise convolution against plain MLX."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import Any

import mlx.core as mx
import pytest

from arriero.kernels import depthwise_conv
from arriero.kernels.metal import depthwise_conv as metal
from tests.metal.launches import ORDERS, apart, caught, emulated, faulty, launch, runnable
from tests.metal.turned_on import calls

__all__ = ["calls"]

pytestmark = runnable

LIMIT = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 5e-3}


def normal(*shape: int, seed: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def given(lengths: list[int], channels: int, taps: int, dilation: int, dtype: mx.Dtype) -> dict[str, Any]:
    """All that a call takes but its weights' types, stops and what follows the sum."""
    return {
        "x": normal(sum(lengths), channels, seed=1, dtype=dtype),
        "w": normal(taps, channels, seed=2),
        "tails": [normal((taps - 1) * dilation, channels, seed=3 + i, dtype=dtype) for i in range(len(lengths))],
        "lengths": lengths,
        "dilation": dilation,
    }


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize(
    ("lengths", "channels", "taps", "dilation", "stops", "how"),
    [
        ([1], 1, 2, 1, [[]], {}),
        ([1, 1, 1], 40, 4, 1, [[], [], []], {"silu": True, "bias": mx.float32}),
        ([7, 2], 270, 4, 1, [[1, 5], [1]], {"silu": True}),
        ([9], 33, 3, 3, [[4]], {"bias": mx.bfloat16}),
    ],
    ids=["one number", "decoding", "states inside", "dilated"],
)
def test_rows_and_tails_are_those_of_plain_mlx(
    dtype: mx.Dtype,
    lengths: list[int],
    channels: int,
    taps: int,
    dilation: int,
    stops: list[list[int]],
    how: dict[str, Any],
) -> None:
    call = given(lengths, channels, taps, dilation, dtype) | {"stops": stops, "silu": "silu" in how}
    call["bias"] = normal(channels, seed=9, dtype=how["bias"]) if "bias" in how else None
    want = depthwise_conv.graph(**call)
    for order in ORDERS:
        y, states = metal.depthwise_conv(**call, launch=launch("depthwise_conv", **order))
        assert apart(y, want.y) <= LIMIT[dtype]
        for ours, inside, end in zip(states, want.interior, want.ends, strict=True):
            for mine, theirs in zip(ours, [*inside, end], strict=True):
                assert mx.array_equal(mine, theirs)


def test_the_operation_takes_the_kernel_where_it_may(calls: Counter[str]) -> None:
    call = given([3, 5], 24, 4, 1, mx.float32) | {"stops": [[2], []], "silu": True}
    made = depthwise_conv.depthwise_conv(**call)
    assert calls == {"depthwise_conv": 1}
    want = depthwise_conv.graph(**call, bias=None)
    assert apart(made.y, want.y) <= 1e-5
    for ours, theirs in zip(chain(*made.interior, made.ends), chain(*want.interior, want.ends), strict=True):
        assert mx.array_equal(ours, theirs)
    # A single tap carries nothing.
    depthwise_conv.depthwise_conv(**given([3], 8, 1, 1, mx.float32))
    assert calls == {"depthwise_conv": 1}


def test_a_row_has_the_same_bits_however_its_sequence_is_cut() -> None:
    call = given([6], 8, 4, 2, mx.bfloat16) | {"bias": None, "silu": True}
    kernel = launch("depthwise_conv", **ORDERS[0])
    whole, every = metal.depthwise_conv(**call, stops=[[2]], launch=kernel)
    rest = call | {"x": call["x"][2:], "lengths": [4], "tails": [every[0][0]]}
    y, ends = metal.depthwise_conv(**rest, stops=[[]], launch=kernel)
    assert mx.array_equal(y, whole[2:])
    assert mx.array_equal(ends[0][0], every[0][1])


@emulated
@pytest.mark.parametrize(
    ("edit", "kinds"),
    [
        (("from < 0 ? float(tails", "from < 1 ? float(tails"), ("out-of-bounds",)),
        (("from < 0 ? float(tails", "from < -1 ? float(tails"), ("out-of-bounds",)),
        (("while (line >= edges[span + 1]) ++span;", "while (edges[span] < 99) ++span;"), ("out-of-bounds",)),
        (("kept[size_t(line - rows)", "kept[size_t(cut)"), ("race",)),
        (("kept[size_t(line - rows)", "kept[size_t(line - rows + 1)"), ("out-of-bounds",)),
        (("line < rows)", "line + 1 < rows)"), ("out-of-bounds", "race", "unwritten-output")),
    ],
    ids=["a tail too long", "a row before the first", "a span too many", "rows of a tail in one place",
         "a tail too far", "a row taken for a tail"],
)  # fmt: skip
def test_planted_faults_are_caught(edit: tuple[str, str], kinds: tuple[str, ...]) -> None:
    call = given([3, 2], 8, 4, 1, mx.float32) | {"bias": None, "stops": [[1], []], "silu": False}
    kernel = faulty("depthwise_conv", edit)
    caught(kinds, lambda seed: metal.depthwise_conv(**call, launch=lambda **launch: kernel(**launch, seed=seed)))
