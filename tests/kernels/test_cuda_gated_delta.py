"""The gated delta rule on an NVIDIA GPU against its graph version, and steps of a delta net against both."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from arriero.kernels import gated_delta as module
from arriero.kernels.cuda import gated_delta as cuda
from arriero.kernels.cuda.gpu import Gpu
from arriero.kernels.depthwise_conv import graph as conv_graph
from arriero.kernels.gated_delta import gated_delta
from arriero.kernels.rms_norm import graph as rms_norm
from tests.helpers.bits import same
from tests.helpers.cuda import ON_GPU, SEED, error, exact, executed

__all__ = ["executed"]

TOLERANCE = {mx.bfloat16: 5e-3, mx.float32: 1e-5}


def random(*shape: int, dtype: mx.Dtype = mx.bfloat16, size: float = 1.0) -> mx.array:
    return mx.array(SEED.normal(0, size, shape).astype(np.float32)).astype(dtype)


def constants(heads: int) -> dict[str, mx.array]:
    return {"rate": mx.exp(random(heads, dtype=mx.float32)), "bias": mx.linspace(-2, 2, heads)}


def inputs(count: int, heads: cuda.Heads, dtype: mx.Dtype) -> list[mx.array]:
    """q, k, v, a and b."""
    q, k = (random(count, heads.key_heads, heads.key_dim, dtype=dtype) for _ in range(2))
    gates = [random(count, heads.heads, dtype=dtype) for _ in range(2)]
    return [q, k, random(count, heads.heads, heads.width, dtype=dtype), *gates]


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
@pytest.mark.parametrize(
    ("heads", "lengths", "stops"),
    [
        (cuda.Heads(1, 2, 32, 32), [5, 1, 37], [[2], [], [1, 32, 36]]),
        pytest.param(cuda.Heads(2, 2, 16, 8), [1] * 9, [[]] * 9, marks=ON_GPU),
        pytest.param(cuda.Heads(2, 4, 128, 64), [3], [[]], marks=ON_GPU),
    ],
)
def test_rows_and_states_are_those_of_the_graph(
    executed: Gpu, dtype: mx.Dtype, heads: cuda.Heads, lengths: list[int], stops: list[list[int]]
) -> None:
    rows = inputs(sum(lengths), heads, dtype)
    states = [random(*heads.state, dtype=mx.float32) for _ in lengths]
    how: dict[str, Any] = {"states": states, "lengths": lengths, "stops": stops, "eps": 1e-6, **constants(heads.heads)}
    ours, theirs = gated_delta(*rows, **how), module.graph(*(x.astype(mx.float32) for x in rows), **how)
    assert ours.y.dtype == dtype
    assert error(ours.y, exact(theirs.y)) < TOLERANCE[dtype]
    for i in range(len(lengths)):
        for mine, other in zip([*ours.interior[i], ours.ends[i]], [*theirs.interior[i], theirs.ends[i]], strict=True):
            assert mine.dtype == mx.float32
            assert error(mine, exact(other)) < 1e-5


@pytest.mark.parametrize("silu", [True, pytest.param(False, marks=ON_GPU)])
@pytest.mark.parametrize(
    ("heads", "lengths", "stops"),
    [
        pytest.param(cuda.Heads(1, 2, 32, 32), [1], [[]], marks=ON_GPU),
        (cuda.Heads(2, 4, 64, 32), [8, 1, 3], [[1, 2, 3, 4, 5, 6, 7], [], []]),
        (cuda.Heads(1, 2, 16, 16), [1] * 9, [[]] * 9),
    ],
)
def test_a_step_is_convolution_rule_and_gated_norm(
    executed: Gpu, silu: bool, heads: cuda.Heads, lengths: list[int], stops: list[list[int]]
) -> None:
    total, values = sum(lengths), heads.heads * heads.width
    x, gates, taps = random(total, heads.channels + values), random(total, 2 * heads.heads), random(4, heads.channels)
    held = [(random(1, 3, heads.channels), random(1, *heads.state, dtype=mx.float32)) for _ in lengths]
    around = cuda.Around(taps, 1 + 0.2 * random(heads.width, dtype=mx.float32), 1e-6, silu)
    how: dict[str, Any] = {"lengths": lengths, "stops": stops, "eps": 1e-6, **constants(heads.heads)}
    ours = cuda.step(heads, around, x, (gates, 0), heads.channels, held=held, **how)

    mixed, z = mx.split(x, [heads.channels], axis=1)
    convolved = conv_graph(
        mixed, taps, None, tails=[t[0] for t, _ in held], lengths=lengths, stops=stops, dilation=1, silu=True
    )
    edges = [heads.key_heads * heads.key_dim, 2 * heads.key_heads * heads.key_dim]
    q, k, v = mx.split(convolved.y, edges, axis=1)
    b, a = mx.split(gates, 2, axis=1)
    shape = (total, heads.key_heads, heads.key_dim)
    made = module.graph(
        q.reshape(shape),
        k.reshape(shape),
        v.reshape(total, heads.heads, -1),
        a,
        b,
        states=[s[0] for _, s in held],
        **how,
    )
    y = rms_norm(made.y.astype(mx.float32), around.gain, 1e-6).reshape(total, values)
    gate = mx.sigmoid(z.astype(mx.float32)) * (z.astype(mx.float32) if silu else 1)
    assert error(ours.y, exact(y * gate)) < 5e-3
    for i in range(len(lengths)):
        assert same(ours.tails[i][0], convolved.ends[i])
        assert error(ours.ends[i][0], exact(made.ends[i])) < 1e-4
        for j in range(len(stops[i])):
            assert same(ours.interior_tails[i][j][0], convolved.interior[i][j])
            assert error(ours.interior[i][j][0], exact(made.interior[i][j])) < 1e-4


def test_tokens_of_a_step_are_those_of_steps_alone(executed: Gpu) -> None:
    heads = cuda.Heads(1, 2, 32, 16)
    x, gates = random(5, heads.channels + 32), random(5, 4)
    around = cuda.Around(random(4, heads.channels), mx.ones((16,)), 1e-6, True)
    held = [(random(1, 3, heads.channels), random(1, *heads.state, dtype=mx.float32))]
    how: dict[str, Any] = {"eps": 1e-6, **constants(2)}

    def step(tokens: slice, held: list[cuda.State], stops: list[int]) -> cuda.Made:
        of = x[tokens]
        return cuda.step(
            heads,
            around,
            of,
            (gates[tokens], 0),
            heads.channels,
            held=held,
            lengths=[of.shape[0]],
            stops=[stops],
            **how,
        )

    together = step(slice(0, 5), held, [1, 2, 3, 4])
    tails, states = [*together.interior_tails[0], *together.tails], [*together.interior[0], *together.ends]
    for t in range(5):
        alone = step(slice(t, t + 1), held, [])
        assert same(alone.y[0], together.y[t])
        held = [(alone.tails[0], alone.ends[0])]
        assert same(held[0][0], tails[t])
        assert same(held[0][1], states[t])


@pytest.mark.parametrize("gain", [mx.float32, *(pytest.param(g, marks=ON_GPU) for g in (None, mx.bfloat16))])
def test_gates_may_be_products_of_the_layers_input(executed: Gpu, gain: mx.Dtype | None) -> None:
    heads, lengths = cuda.Heads(1, 2, 32, 16), [2, 1]
    x, hidden, w = random(3, heads.channels + 32), random(3, 200, size=3.0), random(4, 200, size=0.1)
    norm = None if gain is None else ((1 + 0.2 * random(200, dtype=mx.float32)).astype(gain), 1e-5)
    around = cuda.Around(random(4, heads.channels), mx.ones((16,)), 1e-6, True)
    held = [(random(1, 3, heads.channels), random(1, *heads.state, dtype=mx.float32)) for _ in lengths]
    how: dict[str, Any] = {"held": held, "lengths": lengths, "stops": [[], []], "eps": 1e-6, **constants(2)}
    ours = cuda.step(heads, around, x, cuda.Projected(hidden, w, norm), heads.channels, **how)
    gates = (hidden if norm is None else rms_norm(hidden, *norm)) @ w.T
    theirs = cuda.step(heads, around, x, (gates, 0), heads.channels, **how)
    assert error(ours.y, exact(theirs.y)) < 1e-2
    for a, b in zip(ours.ends, theirs.ends, strict=True):
        assert error(a, exact(b)) < 1e-2
