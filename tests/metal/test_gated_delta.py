"""The Metal gated delta kernel against plain MLX."""

from __future__ import annotations

from itertools import chain
from typing import Any

import mlx.core as mx
import pytest

from arriero.kernels import device, gated_delta
from arriero.kernels.metal import gated_delta as metal
from tests.metal.launches import ORDERS, apart, caught, emulated, faulty, launch, runnable

pytestmark = runnable

LIMIT = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 5e-3}


def inputs(tokens: int, heads: tuple[int, int], widths: tuple[int, int], dtype: mx.Dtype) -> list[mx.array]:
    """q, k, v, a, b; heads and widths of keys and of values."""
    shapes = [(heads[0], widths[0])] * 2 + [(heads[1], widths[1])] + [(heads[1],)] * 2
    return [mx.random.normal((tokens, *shape), key=mx.random.key(i)).astype(dtype) for i, shape in enumerate(shapes)]


def gates(heads: int) -> dict[str, mx.array]:
    rate = mx.exp(mx.random.normal((heads,), key=mx.random.key(7)))
    return {"rate": rate, "bias": mx.random.normal((heads,), key=mx.random.key(8)) * 6}


def state(heads: int, widths: tuple[int, int], seed: int) -> mx.array:
    return mx.random.normal((heads, widths[1], widths[0]), key=mx.random.key(seed))


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize(
    ("tokens", "heads", "widths", "stops"),
    [
        (1, (1, 1), (32, 4), []),
        (7, (2, 4), (64, 8), [1, 4]),
        (3, (1, 3), (128, 12), [2]),
        (2, (1, 2), (256, 4), []),
        (3, (1, 1), (43, 4), [1]),
    ],
    ids=["one token", "states inside", "wide", "widest", "ragged"],
)
def test_tokens_and_states_are_those_of_plain_mlx(
    dtype: mx.Dtype, tokens: int, heads: tuple[int, int], widths: tuple[int, int], stops: list[int]
) -> None:
    q, k, v, a, b = inputs(tokens, heads, widths, dtype)
    start, how = state(heads[1], widths, 9), {**gates(heads[1]), "eps": 1e-6}
    want = gated_delta.graph(q, k, v, a, b, **how, states=[start], lengths=[tokens], stops=[stops])
    for order in ORDERS:
        y, kept = metal.gated_delta(
            q, k, v, a, b, **how, states=start[None], stops=[*stops, tokens], launch=launch("gated_delta", **order)
        )
        assert apart(y, want.y) <= LIMIT[dtype]
        for i, after in enumerate([*want.interior[0], want.ends[0]]):
            assert apart(kept[i, 0], after) <= 1e-5


@pytest.mark.parametrize(
    ("lengths", "stops"),
    [([2, 2, 2], [[1], [1], [1]]), ([1, 4], [[], [1, 3]])],
    ids=["alike, in one launch", "unlike, one after another"],
)
def test_the_operation_takes_the_kernel_where_it_may(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int], stops: list[list[int]]
) -> None:
    calls: list[str] = []

    def asked(name: str) -> Any:
        calls.append(name)
        return launch(name, **ORDERS[0])

    monkeypatch.setattr(device, "native", lambda: None)
    parts = inputs(sum(lengths), (1, 2), (32, 8), mx.float32)
    how: dict[str, Any] = {
        "states": [state(2, (32, 8), i) for i in range(len(lengths))],
        "lengths": lengths,
        "stops": stops,
    }
    want = gated_delta.gated_delta(*parts, **gates(2), **how)
    monkeypatch.setattr(device, "metal", lambda: True)
    monkeypatch.setattr(metal, "kernel", asked)
    made = gated_delta.gated_delta(*parts, **gates(2), **how)
    assert len(calls) == len({*lengths})
    assert apart(made.y, want.y) <= 1e-5
    for ours, theirs in zip(made.ends, want.ends, strict=True):
        assert apart(ours, theirs) <= 1e-5
    for ours, theirs in zip(chain(*made.interior), chain(*want.interior), strict=True):
        assert apart(ours, theirs) <= 1e-5


def test_gates_far_from_zero_neither_overflow_nor_vanish() -> None:
    q, k, v, _, _ = inputs(4, (1, 1), (32, 4), mx.float32)
    a, b = mx.array([[-80.0], [80.0], [-5.0], [0.0]]), mx.array([[200.0], [-200.0], [3.0], [0.0]])
    how: dict[str, Any] = {"rate": mx.array([1e-3]), "bias": mx.array([0.0]), "eps": 1e-6}
    start = state(1, (32, 4), 3)
    want = gated_delta.graph(q, k, v, a, b, **how, states=[start], lengths=[4], stops=[[]])
    y, kept = metal.gated_delta(
        q, k, v, a, b, **how, states=start[None], stops=[4], launch=launch("gated_delta", **ORDERS[0])
    )
    assert apart(y, want.y) <= 1e-5
    assert apart(kept[0, 0], want.ends[0]) <= 1e-5


@emulated
@pytest.mark.parametrize(
    ("edit", "kinds"),
    [
        (("next < dims[1] && ", "next + 1 < dims[1] && "), ("unwritten-output",)),
        (("if (lane == 0) y[at]", "y[at]"), ("race",)),
        (("kept[next * whole", "kept[(next + 1) * whole"), ("out-of-bounds",)),
        (("made = simd_sum(made);", "if (lane > 0) made = simd_sum(made);"), ("divergence", "inactive-lane")),
        (("size_t(token) * HK + key_head", "size_t(token) * HK + head"), ("out-of-bounds",)),
    ],
    ids=["a state left out", "all lanes write", "a state too many", "a sum that lanes skip", "a head too many"],
)
def test_planted_faults_are_caught(edit: tuple[str, str], kinds: tuple[str, ...]) -> None:
    kernel, parts, how = faulty("gated_delta", edit), inputs(3, (1, 2), (32, 4), mx.float32), gates(2)

    def run(seed: int) -> Any:
        given = {**how, "states": state(2, (32, 4), 3)[None], "stops": [1, 3], "eps": 1e-6}
        return metal.gated_delta(*parts, **given, launch=lambda **call: kernel(**call, seed=seed))

    caught(kinds, run)
