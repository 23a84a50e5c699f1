"""The selective state space against a double-precision loop, and against itself to the bit."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arriero.kernels import device
from arriero.kernels import mamba2 as module
from arriero.kernels.mamba2 import chunked, mamba2, recurrent
from tests.helpers.bits import same

HEADS, WIDTH, GROUPS, SIZE = 6, 21, 2, 40
SHAPE = (HEADS, WIDTH, GROUPS, SIZE)


def wide(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def plain(
    rows: list[mx.array], constants: dict[str, mx.array], state: mx.array, limits: tuple[float, float] = (0, np.inf)
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Rows and the state after each of them, as the module's docstring says it."""
    x, b, c, dt = (wide(part) for part in rows)
    b, c = (np.repeat(part, x.shape[1] // part.shape[1], axis=1) for part in (b, c))
    step = np.clip(np.logaddexp(0, dt + wide(constants["bias"])), *limits)
    decay = np.exp(-wide(constants["rate"]) * step)
    s, y, states = wide(state), [], []
    for t in range(len(x)):
        s = s * decay[t, :, None, None] + (step[t, :, None] * x[t])[:, :, None] * b[t, :, None]
        y.append(np.einsum("hpn,hn->hp", s, c[t]) + wide(constants["skip"])[:, None] * x[t])
        states.append(s)
    return np.array(y), states


def rows_of(
    count: int, seed: int = 0, dtype: mx.Dtype = mx.float32, shape: tuple[int, int, int, int] = SHAPE
) -> list[mx.array]:
    heads, width, groups, size = shape
    shapes = [(heads, width), (groups, size), (groups, size), (heads,)]
    keys = mx.random.split(mx.random.key(seed), len(shapes))
    return [mx.random.normal((count, *s), key=key).astype(dtype) for s, key in zip(shapes, keys, strict=True)]


def constants(heads: int = HEADS) -> dict[str, mx.array]:
    return {
        "rate": mx.exp(mx.random.normal((heads,), key=mx.random.key(7))),
        "bias": mx.linspace(-2, 2, heads),
        "skip": mx.linspace(0.5, 1.5, heads),
    }


def state_of(seed: int, shape: tuple[int, ...] = (HEADS, WIDTH, SIZE)) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def error(got: mx.array, want: np.ndarray) -> float:
    """Largest error of a row over the largest row norm."""
    return float(np.linalg.norm(wide(got) - want, axis=-1).max() / np.linalg.norm(want, axis=-1).max())


@pytest.mark.parametrize(("dtype", "bound"), [(mx.float32, 3e-6), (mx.bfloat16, 4e-3), (mx.float16, 6e-4)])
@pytest.mark.parametrize("shape", [SHAPE, (1, 1, 1, 1), (2, 128, 1, 128), (4, 5, 4, 32)])
def test_rows_and_states_are_those_of_the_recurrence(dtype, bound, shape):
    heads, width, _, size = shape
    lengths, stops = [5, 1, 40], [[2], [], [1, 31, 39]]
    rows = rows_of(46, dtype=dtype, shape=shape)
    states = [state_of(i, (heads, width, size)) for i in range(3)]
    result = mamba2(*rows, **constants(heads), states=states, lengths=lengths, stops=stops)
    assert result.y.dtype == dtype
    start = 0
    for i, length in enumerate(lengths):
        want, every = plain([part[start : start + length] for part in rows], constants(heads), states[i])
        assert error(result.y[start : start + length], want) < bound
        for stop, state in zip([*stops[i], length], [*result.interior[i], result.ends[i]], strict=True):
            assert state.dtype == mx.float32
            assert error(state, every[stop - 1]) < 4e-6
        start += length


@pytest.mark.parametrize("limits", [(0.5, float("inf")), (0.0, 0.8), (0.3, 1.1)])
def test_the_step_keeps_within_its_limits(limits):
    rows = rows_of(7)
    result = mamba2(*rows, **constants(), states=[state_of(0)], lengths=[7], limits=limits)
    want, every = plain(rows, constants(), state_of(0), limits)
    assert error(result.y, want) < 3e-6
    assert error(result.ends[0], every[-1]) < 4e-6
    free, _ = plain(rows, constants(), state_of(0))
    assert error(result.y, free) > 1e-2


def test_steps_at_their_ends_ignore_a_token_and_forget_what_was():
    rows = rows_of(2)
    rows[3] = mx.array([[-np.inf] * HEADS, [1e4] * HEADS])
    state = state_of(1)
    result = mamba2(*rows, **constants(), states=[state], lengths=[2], stops=[[1]])
    assert same(result.interior[0][0], state)
    write = np.repeat(wide(rows[1])[1], HEADS // GROUPS, axis=0)
    step = 1e4 + wide(constants()["bias"])
    assert error(result.ends[0], (step[:, None] * wide(rows[0])[1])[:, :, None] * write[:, None]) < 1e-6


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(0, 1000))
def test_any_cut_of_a_sequence_gives_the_same_bits(pieces, seed):
    rows = rows_of(sum(pieces), seed)
    ends = [sum(pieces[: i + 1]) for i in range(len(pieces))]
    whole = mamba2(*rows, **constants(), states=[state_of(seed)], lengths=[ends[-1]], stops=[ends[:-1]])
    state, start, outputs = state_of(seed), 0, []
    for i, end in enumerate(ends):
        part = mamba2(*(x[start:end] for x in rows), **constants(), states=[state], lengths=[end - start])
        outputs.append(part.y)
        state, start = part.ends[0], end
        assert same(state, [*whole.interior[0], whole.ends[0]][i])
    assert same(mx.concatenate(outputs), whole.y)


@pytest.mark.parametrize("cpu", [True, False])
@pytest.mark.parametrize("lengths", [[1, 1, 1, 1], [3, 3], [2, 7, 1]])
def test_company_does_not_change_a_span(monkeypatch, lengths, cpu):
    monkeypatch.setattr(device, "on_cpu", lambda: cpu)
    rows = rows_of(sum(lengths), 3)
    states = [state_of(i) for i in range(len(lengths))]
    together = mamba2(*rows, **constants(), states=states, lengths=lengths)
    start = 0
    for i, length in enumerate(lengths):
        alone = mamba2(*(x[start : start + length] for x in rows), **constants(), states=[states[i]], lengths=[length])
        assert same(alone.y, together.y[start : start + length])
        assert same(alone.ends[0], together.ends[i])
        start += length


def test_the_states_that_came_in_are_left_alone():
    state = state_of(5)
    before = mx.array(np.array(state))
    mx.eval(mamba2(*rows_of(3), **constants(), states=[state], lengths=[3]))
    assert same(state, before)


def test_slices_of_one_packed_product_are_taken_as_they_are():
    rows = rows_of(6, dtype=mx.bfloat16)
    packed = mx.concatenate([part.reshape(6, -1) for part in rows], axis=1)
    edges = np.cumsum([HEADS * WIDTH, GROUPS * SIZE, GROUPS * SIZE]).tolist()
    views = [part.reshape(row.shape) for part, row in zip(mx.split(packed, edges, axis=1), rows, strict=True)]
    result = mamba2(*views, **constants(), states=[state_of(0)], lengths=[6])
    assert same(result.y, mamba2(*rows, **constants(), states=[state_of(0)], lengths=[6]).y)


def prepared(count: int) -> list[mx.array]:
    """Inputs as the two forms take them, of one span."""
    x, b, c, dt = rows_of(count, 9, shape=(4, 8, 2, 16))
    return [part[None] for part in (x, b, c, -mx.abs(dt))]


@pytest.mark.parametrize("stops", [[64], [1], [130], [3, 67, 131, 200]])
def test_chunks_equal_the_steps(stops):
    inputs, state = prepared(stops[-1]), state_of(2, (1, 4, 8, 16))
    y, states = chunked(inputs, state, stops)
    want, every = recurrent(inputs, state, stops)
    assert error(y, wide(want)) < 3e-6
    for got, expected in zip(states, every, strict=True):
        assert error(got, wide(expected)) < 3e-6


def test_chunks_that_forget_everything_stay_finite():
    x, b, c, decay = prepared(64)
    inputs = [x, b, c, mx.full(decay.shape, -80.0)]
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
def test_only_long_spans_of_16_bits_on_a_gpu_go_by_chunks(monkeypatch, dtype, count, cpu, chunks, spans):
    called: list[int] = []

    def spy(inputs: Any, state: mx.array, stops: list[int]) -> tuple[mx.array, list[mx.array]]:
        called.append(stops[-1])
        return chunked(inputs, state, stops)

    monkeypatch.setattr(module, "chunked", spy)
    monkeypatch.setattr(device, "on_cpu", lambda: cpu)
    states, lengths = [state_of(i) for i in range(spans)], [count] * spans
    mamba2(*rows_of(count * spans, dtype=dtype), **constants(), states=states, lengths=lengths)
    assert called == (lengths if chunks else [])


def test_what_does_not_fit_is_refused():
    rows, good = rows_of(4), {"states": [state_of(0)], "lengths": [4]}
    for wrong, match in (
        ({"lengths": [3]}, "4 were given"),
        ({"lengths": [4, 0], "states": [state_of(0)] * 2}, "none may be empty"),
        ({"stops": [[4]]}, "strictly inside"),
        ({"states": [state_of(0).astype(mx.bfloat16)]}, "float32"),
        ({"states": [state_of(0)[:, :, 1:]]}, "need"),
    ):
        with pytest.raises(ValueError, match=match):
            mamba2(*rows, **constants(), **{**good, **wrong})
    with pytest.raises(ValueError, match="must agree"):
        mamba2(rows[0], rows[1][:, :, 1:], *rows[2:], **constants(), **good)
    with pytest.raises(ValueError, match="multiple of their groups"):
        mamba2(rows[0][:, 1:], *rows[1:3], rows[3][:, 1:], **constants(), **good)
    with pytest.raises(ValueError, match="one value per row"):
        mamba2(*rows[:3], rows[3][:, 1:], **constants(), **good)
