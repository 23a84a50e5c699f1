"""Causal depthwise convolution against double precision, and against itself to the bit."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from arriero.kernels import depthwise_conv as module
from arriero.kernels.depthwise_conv import depthwise_conv
from tests.helpers.bits import same

pytestmark = pytest.mark.usefixtures("kernels")

BOUNDS = {mx.float32: 2e-6, mx.bfloat16: 4e-3, mx.float16: 5e-4}


def wide(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def random(*shape: int, seed: int = 0, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def plain(window: np.ndarray, w: mx.array, bias: mx.array | None, dilation: int, silu: bool) -> np.ndarray:
    taps = wide(w)
    rows = len(window) - (len(taps) - 1) * dilation
    y = sum(taps[j] * window[j * dilation : j * dilation + rows] for j in range(len(taps)))
    y = y if bias is None else y + wide(bias)
    return y / (1 + np.exp(-y)) if silu else y


def error(got: mx.array, want: np.ndarray) -> float:
    return float(np.linalg.norm(wide(got) - want, axis=-1).max() / np.linalg.norm(want, axis=-1).max())


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(
    ("taps", "dilation", "channels"), [(4, 1, 70), (4, 3, 1100), (1, 1, 3), (2, 7, 16), (17, 1, 9)]
)
@pytest.mark.parametrize(("biased", "silu"), [(True, True), (False, False), (False, True)])
def test_rows_and_tails_are_those_of_the_convolution(dtype, taps, dilation, channels, biased, silu):
    lengths, stops = [1, 66, 4], [[], [1, 30, 65], [3]]
    history = (taps - 1) * dilation
    x = random(71, channels, dtype=dtype)
    w = random(taps, channels, seed=1)
    bias = random(channels, seed=2) if biased else None
    tails = [random(history, channels, seed=3 + i, dtype=dtype) for i in range(3)]
    result = depthwise_conv(x, w, bias, tails=tails, lengths=lengths, stops=stops, dilation=dilation, silu=silu)
    assert result.y.dtype == dtype
    start = 0
    for i, length in enumerate(lengths):
        window = np.concatenate([wide(tails[i]), wide(x[start : start + length])])
        want = plain(window, w, bias, dilation, silu)
        assert error(result.y[start : start + length], want) < BOUNDS[dtype]
        for stop, tail in zip([*stops[i], length], [*result.interior[i], result.ends[i]], strict=True):
            assert tail.dtype == dtype
            assert np.array_equal(wide(tail), window[stop : stop + history])
        start += length


def test_the_last_tap_meets_the_row_itself():
    w = mx.array([[0.0], [0.0], [1.0]])
    x = mx.array([[1.0], [2.0], [3.0]])
    assert same(depthwise_conv(x, w, tails=[mx.zeros((2, 1))], lengths=[3]).y, x)
    late = depthwise_conv(x, w[::-1], tails=[mx.array([[8.0], [9.0]])], lengths=[3])
    assert late.y.tolist() == [[8.0], [9.0], [1.0]]
    assert late.ends[0].tolist() == [[2.0], [3.0]]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(1, 3), st.sampled_from(list(BOUNDS)))
def test_any_cut_of_a_sequence_gives_the_same_bits(pieces, dilation, dtype):
    x, w = random(sum(pieces), 37, dtype=dtype), random(4, 37, seed=1)
    tail = random(3 * dilation, 37, seed=2, dtype=dtype)
    ends = [sum(pieces[: i + 1]) for i in range(len(pieces))]
    how: dict[str, Any] = {"dilation": dilation, "silu": True}
    whole = depthwise_conv(x, w, tails=[tail], lengths=[ends[-1]], stops=[ends[:-1]], **how)
    start, outputs = 0, []
    for i, end in enumerate(ends):
        part = depthwise_conv(x[start:end], w, tails=[tail], lengths=[end - start], **how)
        outputs.append(part.y)
        tail, start = part.ends[0], end
        assert same(tail, [*whole.interior[0], whole.ends[0]][i])
    assert same(mx.concatenate(outputs), whole.y)


@pytest.mark.parametrize("lengths", [[1, 1, 1], [4, 4], [2, 70, 1]])
def test_company_does_not_change_a_span(lengths):
    x, w = random(sum(lengths), 50), random(4, 50, seed=1)
    tails = [random(3, 50, seed=i) for i in range(len(lengths))]
    together = depthwise_conv(x, w, tails=tails, lengths=lengths, silu=True)
    start = 0
    for i, length in enumerate(lengths):
        alone = depthwise_conv(x[start : start + length], w, tails=[tails[i]], lengths=[length], silu=True)
        assert same(alone.y, together.y[start : start + length])
        assert same(alone.ends[0], together.ends[i])
        start += length


def test_columns_of_a_wider_product_are_taken_as_they_are():
    packed, w, tail = random(9, 60), random(4, 40, seed=1), mx.zeros((3, 40))
    views = depthwise_conv(packed[:, 10:50], w, tails=[tail], lengths=[9])
    copied = depthwise_conv(mx.contiguous(packed[:, 10:50]), w, tails=[tail], lengths=[9])
    assert same(views.y, copied.y)
    assert same(views.ends[0], copied.ends[0])


def test_a_tail_does_not_keep_the_rows_in_memory():
    x, w = random(4096, 64), random(4, 64, seed=1)
    mx.eval(x, w)
    mx.clear_cache()
    before = mx.get_active_memory()
    tails = [depthwise_conv(x + i, w, tails=[mx.zeros((3, 64))], lengths=[4096]).ends[0] for i in range(3)]
    mx.eval(tails)
    assert mx.get_active_memory() - before < x.nbytes // 4


def test_silu_of_large_values_stays_finite():
    x = mx.array([[-1e4, -100.0, 0.0, 100.0, 1e4]])
    y = depthwise_conv(x, mx.ones((1, 5)), tails=[mx.zeros((0, 5))], lengths=[1], silu=True).y
    assert np.allclose(np.array(y), [[0, 0, 0, 100, 1e4]])


def test_the_extension_agrees_with_plain_mlx(kernels):
    if kernels == "graph":
        pytest.skip("compares the two once")
    x, w, bias = random(30, 77), random(4, 77, seed=1), random(77, seed=2)
    how = {"tails": [random(9, 77, seed=3)], "lengths": [30], "stops": [[4]], "dilation": 3, "silu": True}
    native, graph = depthwise_conv(x, w, bias, **how), module.graph(x, w, bias, **how)
    assert error(native.y, wide(graph.y)) < 1e-6
    assert same(native.ends[0], graph.ends[0])
    assert same(native.interior[0][0], graph.interior[0][0])


def test_what_does_not_fit_is_refused():
    x, w, tail = random(4, 8), random(4, 8), mx.zeros((3, 8))
    for tails, lengths, stops, match in (
        ([tail], [3], None, "4 were given"),
        ([tail, tail], [4, 0], None, "none may be empty"),
        ([tail], [4], [[4]], "strictly inside"),
        ([tail[1:]], [4], None, "need"),
        ([tail.astype(mx.float16)], [4], None, "need"),
    ):
        with pytest.raises(ValueError, match=match):
            depthwise_conv(x, w, tails=tails, lengths=lengths, stops=stops)
    for taps, dilation in ((w[:, 1:], 1), (w, 0)):
        with pytest.raises(ValueError, match="do not fit"):
            depthwise_conv(x, taps, tails=[tail], lengths=[4], dilation=dilation)
