"""The gated delta rule against a double-precision loop, and against itself to the bit."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from arriero.kernels import device
from arriero.kernels import gated_delta as module
from arriero.kernels.gated_delta import chunked, gated_delta, recurrent
from tests.helpers.bits import same

pytestmark = pytest.mark.usefixtures("kernels")

KEY_HEADS, HEADS, SIZE, WIDTH = 2, 6, 40, 21


def wide(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def plain(rows: list[mx.array], rate: mx.array, bias: mx.array, state: mx.array) -> tuple[np.ndarray, list[np.ndarray]]:
    """Rows and the state after each of them, as the module's docstring says it."""
    q, k, v, a, b = (wide(x) for x in rows)
    repeat = v.shape[1] // q.shape[1]
    q, k = (np.repeat(x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6), repeat, axis=1) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    decay = np.exp(-wide(rate) * np.logaddexp(0, a + wide(bias)))
    beta = 1 / (1 + np.exp(-b))
    s, y, states = wide(state), [], []
    for t in range(len(q)):
        s = s * decay[t, :, None, None]
        s = s + (beta[t, :, None] * (v[t] - np.einsum("hvk,hk->hv", s, k[t])))[:, :, None] * k[t, :, None]
        y.append(np.einsum("hvk,hk->hv", s, q[t]))
        states.append(s)
    return np.array(y), states


def rows_of(
    count: int, seed: int = 0, dtype: mx.Dtype = mx.float32, shape: tuple[int, int, int, int] | None = None
) -> list[mx.array]:
    key_heads, heads, size, width = shape or (KEY_HEADS, HEADS, SIZE, WIDTH)
    shapes = [(key_heads, size), (key_heads, size), (heads, width), (heads,), (heads,)]
    keys = mx.random.split(mx.random.key(seed), len(shapes))
    return [mx.random.normal((count, *s), key=key).astype(dtype) for s, key in zip(shapes, keys, strict=True)]


def constants(heads: int = HEADS) -> dict[str, Any]:
    return {"rate": mx.exp(mx.random.normal((heads,), key=mx.random.key(7))), "bias": mx.linspace(-2, 2, heads)}


def state_of(seed: int, shape: tuple[int, int, int] = (HEADS, WIDTH, SIZE)) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def error(got: mx.array, want: np.ndarray) -> float:
    """Largest error of a row over the largest row norm."""
    return float(np.linalg.norm(wide(got) - want, axis=-1).max() / np.linalg.norm(want, axis=-1).max())


@pytest.mark.parametrize(("dtype", "bound"), [(mx.float32, 3e-6), (mx.bfloat16, 4e-3), (mx.float16, 6e-4)])
@pytest.mark.parametrize("shape", [(2, 6, 40, 21), (1, 1, 1, 1), (1, 2, 128, 128), (4, 4, 32, 5)])
def test_rows_and_states_are_those_of_the_rule(dtype, bound, shape):
    _, heads, size, width = shape
    lengths, stops = [5, 1, 40], [[2], [], [1, 31, 39]]
    rows = rows_of(46, dtype=dtype, shape=shape)
    states = [state_of(i, (heads, width, size)) for i in range(3)]
    result = gated_delta(*rows, **constants(heads), states=states, lengths=lengths, stops=stops)
    assert result.y.dtype == dtype
    start = 0
    for i, length in enumerate(lengths):
        want, every = plain([x[start : start + length] for x in rows], **constants(heads), state=states[i])
        assert error(result.y[start : start + length], want) < bound
        for stop, state in zip([*stops[i], length], [*result.interior[i], result.ends[i]], strict=True):
            assert state.dtype == mx.float32
            assert error(state, every[stop - 1]) < 4e-6
        start += length


def test_gates_at_their_limits_forget_and_ignore():
    rows = rows_of(3)
    rows[3] = mx.array([[-np.inf] * HEADS, [1e4] * HEADS, [-1e4] * HEADS])
    rows[4] = mx.array([[-np.inf] * HEADS, [1e4] * HEADS, [-1e4] * HEADS])
    state = state_of(1)
    result = gated_delta(*rows, **constants(), states=[state], lengths=[3], stops=[[1, 2]])
    kept, replaced = result.interior[0]
    assert same(kept, state)  # nothing decays, nothing is written: what padding asks for
    key = wide(rows[1])[1]
    key = np.repeat(key / np.linalg.norm(key, axis=-1, keepdims=True), HEADS // KEY_HEADS, axis=0)
    assert error(replaced, wide(rows[2])[1][:, :, None] * key[:, None]) < 1e-5
    assert same(result.ends[0], replaced)


def test_rows_of_zeros_and_of_huge_numbers_stay_finite():
    rows = rows_of(4)
    rows[0], rows[1] = mx.zeros_like(rows[0]), rows[1] * mx.array([0.0, 1e15, 1.0, 1e-20])[:, None, None]
    result = gated_delta(*rows, **constants(), states=[state_of(1)], lengths=[4])
    want, every = plain(rows, **constants(), state=state_of(1))
    assert not want.any()
    assert not wide(result.y).any()
    assert error(result.ends[0], every[-1]) < 4e-6


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(0, 1000))
def test_any_cut_of_a_sequence_gives_the_same_bits(pieces, seed):
    rows = rows_of(sum(pieces), seed)
    ends = [sum(pieces[: i + 1]) for i in range(len(pieces))]
    whole = gated_delta(*rows, **constants(), states=[state_of(seed)], lengths=[ends[-1]], stops=[ends[:-1]])
    state, start, outputs = state_of(seed), 0, []
    for i, end in enumerate(ends):
        part = gated_delta(*(x[start:end] for x in rows), **constants(), states=[state], lengths=[end - start])
        outputs.append(part.y)
        state, start = part.ends[0], end
        assert same(state, [*whole.interior[0], whole.ends[0]][i])
    assert same(mx.concatenate(outputs), whole.y)


@pytest.mark.parametrize("lengths", [[1, 1, 1, 1], [3, 3], [2, 7, 1]])
def test_company_does_not_change_a_span(lengths):
    rows = rows_of(sum(lengths), 3)
    states = [state_of(i) for i in range(len(lengths))]
    together = gated_delta(*rows, **constants(), states=states, lengths=lengths)
    start = 0
    for i, length in enumerate(lengths):
        alone = gated_delta(
            *(x[start : start + length] for x in rows), **constants(), states=[states[i]], lengths=[length]
        )
        assert same(alone.y, together.y[start : start + length])
        assert same(alone.ends[0], together.ends[i])
        start += length


def test_the_states_that_came_in_are_left_alone():
    state = state_of(5)
    before = mx.array(np.array(state))
    mx.eval(gated_delta(*rows_of(3), **constants(), states=[state], lengths=[3]))
    assert same(state, before)


def test_slices_of_one_packed_product_are_taken_as_they_are():
    rows = rows_of(6, dtype=mx.bfloat16)
    packed = mx.concatenate([x.reshape(6, -1) for x in rows[:3]], axis=1)
    edges = [KEY_HEADS * SIZE, 2 * KEY_HEADS * SIZE]
    q, k, v = (x.reshape(y.shape) for x, y in zip(mx.split(packed, edges, axis=1), rows[:3], strict=True))
    views = gated_delta(q, k, v, *rows[3:], **constants(), states=[state_of(0)], lengths=[6])
    assert same(views.y, gated_delta(*rows, **constants(), states=[state_of(0)], lengths=[6]).y)


def test_the_extension_agrees_with_plain_mlx(kernels):
    if kernels == "graph":
        pytest.skip("compares the two once")
    rows, how = rows_of(30), {"states": [state_of(0)], "lengths": [30], "stops": [[11]], "eps": 1e-6}
    native, graph = gated_delta(*rows, **constants(), **how), module.graph(*rows, **constants(), **how)
    assert error(native.y, wide(graph.y)) < 3e-6
    assert error(native.interior[0][0], wide(graph.interior[0][0])) < 3e-6
    assert error(native.ends[0], wide(graph.ends[0])) < 3e-6


def prepared(count: int, size: int = 16) -> list[mx.array]:
    """Inputs as the two graph forms take them."""
    q, k, v, a, b = rows_of(count, 9, shape=(2, 4, size, 8))
    q, k = (x / mx.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    return [x[None] for x in (q * size**-0.5, k, v, -mx.abs(a), mx.sigmoid(b))]


@pytest.mark.parametrize("stops", [[64], [1], [130], [3, 67, 131, 200]])
def test_chunks_equal_the_steps(stops):
    inputs, state = prepared(stops[-1]), state_of(2, (1, 4, 8, 16))
    y, states = chunked(inputs, state, stops)
    want, every = recurrent(inputs, state, stops)
    assert error(y, wide(want)) < 3e-6
    for got, expected in zip(states, every, strict=True):
        assert error(got, wide(expected)) < 3e-6


def test_chunks_of_one_repeated_key_written_in_full_do_not_cancel():
    q, k, v, decay, beta = prepared(64)
    inputs = [q, mx.broadcast_to(k[:, :1], k.shape), v, mx.zeros_like(decay), mx.ones_like(beta)]
    state = state_of(2, (1, 4, 8, 16))
    y, states = chunked(inputs, state, [64])
    want, every = recurrent(inputs, state, [64])
    assert error(y, wide(want)) < 1e-5
    assert error(states[0], wide(every[0])) < 1e-5


def test_chunks_that_forget_everything_stay_finite():
    q, k, v, decay, beta = prepared(64)
    inputs = [q, k, v, mx.full(decay.shape, -80.0), beta]
    y, _ = chunked(inputs, state_of(2, (1, 4, 8, 16)), [64])
    want, _ = recurrent(inputs, state_of(2, (1, 4, 8, 16)), [64])
    assert error(y, wide(want)) < 3e-6


@pytest.mark.parametrize("spans", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "count", "cpu", "chunks"),
    [
        (mx.bfloat16, 64, False, True),
        (mx.bfloat16, module.CHUNKED_FROM - 1, False, False),
        (mx.float32, 64, False, False),
        (mx.bfloat16, 64, True, False),
    ],
)
def test_only_long_spans_of_16_bits_on_a_gpu_go_by_chunks(kernels, monkeypatch, dtype, count, cpu, chunks, spans):
    if kernels == "native":
        pytest.skip("about plain MLX")
    called: list[int] = []

    def spy(inputs: list[mx.array], state: mx.array, stops: list[int]) -> tuple[mx.array, list[mx.array]]:
        called.append(stops[-1])
        return chunked(inputs, state, stops)

    monkeypatch.setattr(module, "chunked", spy)
    monkeypatch.setattr(device, "on_cpu", lambda: cpu)
    states, lengths = [state_of(i) for i in range(spans)], [count] * spans
    gated_delta(*rows_of(count * spans, dtype=dtype), **constants(), states=states, lengths=lengths)
    assert called == (lengths if chunks else [])


def test_what_does_not_fit_is_refused():
    rows, good = rows_of(4), {"states": [state_of(0)], "lengths": [4]}
    for wrong, match in (
        ({"lengths": [3]}, "4 were given"),
        ({"lengths": [4, 0], "states": [state_of(0)] * 2}, "none may be empty"),
        ({"lengths": [2, 2]}, "its own"),
        ({"stops": [[4]]}, "strictly inside"),
        ({"stops": [[0, 2]]}, "strictly inside"),
        ({"stops": [[2, 2]]}, "rise"),
        ({"stops": [[1], [2]]}, "2 of 1"),
        ({"states": [state_of(0).astype(mx.bfloat16)]}, "float32"),
        ({"states": [state_of(0)[:, :, 1:]]}, "need"),
    ):
        with pytest.raises(ValueError, match=match):
            gated_delta(*rows, **constants(), **{**good, **wrong})
    with pytest.raises(ValueError, match="must agree"):
        gated_delta(rows[0][:, :, 1:], *rows[1:], **constants(), **good)
    with pytest.raises(ValueError, match="one value per row"):
        gated_delta(*rows[:4], rows[4][:, 1:], **constants(), **good)
