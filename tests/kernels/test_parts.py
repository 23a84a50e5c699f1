"""The halves of a layer: the same whether they are one operation or many, and in any company."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from arriero.kernels.activation import Activation
from arriero.kernels.attention_part import AttentionPart
from arriero.kernels.gated_part import GatedPart
from arriero.kernels.matrix import Matrix

pytestmark = pytest.mark.usefixtures("kernels")

HIDDEN, HEADS, KV_HEADS, SIZE, INNER, CAPACITY = 64, 4, 2, 16, 96, 768
NORMS: dict[str, Any] = {"before": 64, "query_norm": 16, "key_norm": 16, "after": 64}


def random(*shape: int, seed: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return (0.3 * mx.random.normal(shape, key=mx.random.key(seed))).astype(dtype)


def matrix(rows: int, columns: int, seed: int, dtype: mx.Dtype, *, packed: bool, bias: bool = False) -> Matrix:
    w = random(rows, columns, seed=seed, dtype=dtype)
    vector = random(rows, seed=seed + 1, dtype=dtype) if bias else None
    if not packed:
        return Matrix(w, bias=vector)
    return Matrix(*mx.quantize(w, group_size=32, bits=4), group_size=32, bits=4, bias=vector)


def attention_part(dtype: mx.Dtype, *, packed: bool, rich: bool, window: int | None = None) -> AttentionPart:
    norms = {}
    if rich:
        norms = {name: (1 + random(n, seed=i), 1e-5) for i, (name, n) in enumerate(NORMS.items())}
    widths = [HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE]
    rows = widths if rich else [sum(widths)]
    qkv = [matrix(n, HIDDEN, 10 * i, dtype, packed=packed, bias=rich) for i, n in enumerate(rows)]
    out = matrix(HIDDEN, HEADS * SIZE, 60, dtype, packed=packed, bias=rich)
    return AttentionPart(
        qkv, out, HEADS, KV_HEADS, SIZE, 0.25, window, 4.0 if rich else None, interleaved=rich, **norms
    )


def angles(positions: np.ndarray) -> mx.array:
    turns = positions[:, None] * np.linspace(1, 0.01, SIZE // 2)
    return mx.array(np.stack([np.cos(turns), np.sin(turns)], axis=-1).astype(np.float32))


def run(
    part: AttentionPart, x: mx.array, buffers: list[mx.array], lengths: list[int], positions: list[int], base: int = 0
) -> tuple[np.ndarray, list[np.ndarray]]:
    spans = zip(lengths, positions, strict=True)
    turns = angles(np.concatenate([np.arange(p, p + n) for n, p in spans]))
    # The buffers are given up, so each run has its own.
    given = [buffer + 0 for buffer in buffers]
    mx.eval(given)
    bases = [base] * len(lengths)
    y, filled = part(x, turns, given, lengths=lengths, positions=positions, bases=bases, memo={})
    return np.array(y.astype(mx.float32)), [np.array(buffer.astype(mx.float32)) for buffer in filled]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("rich", [False, True], ids=["plain", "rich"])
def test_attention_is_what_its_steps_give(dtype: mx.Dtype, packed: bool, rich: bool) -> None:
    part = attention_part(dtype, packed=packed, rich=rich, window=20 if rich else None)
    lengths, positions = [3, 1, 30], [0, 290, 240]
    x = random(34, HIDDEN, seed=99, dtype=dtype)
    buffers = [random(1, KV_HEADS, CAPACITY, SIZE, seed=i, dtype=dtype) for i in range(6)]
    spans: dict[str, Any] = {"lengths": lengths, "positions": positions, "bases": [0, 0, 0], "memo": {}}
    turns = angles(np.concatenate([np.arange(p, p + n) for n, p in zip(lengths, positions, strict=True)]))
    expected, kept = part.graph(x, turns, [buffer + 0 for buffer in buffers], **spans)
    found, filled = run(part, x, buffers, lengths, positions)
    tolerance = 2e-5 if dtype == mx.float32 else 0.05
    np.testing.assert_allclose(found, np.array(expected.astype(mx.float32)), atol=tolerance, rtol=tolerance)
    for mine, theirs in zip(filled, kept, strict=True):
        np.testing.assert_allclose(mine, np.array(theirs.astype(mx.float32)), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("window", [None, 40])
def test_a_token_has_the_same_bits_in_any_chunk_and_company(packed: bool, window: int | None) -> None:
    part = attention_part(mx.float32, packed=packed, rich=False, window=window)
    x = random(300, HIDDEN, seed=5)
    other = random(7, HIDDEN, seed=6)
    buffers = [random(1, KV_HEADS, CAPACITY, SIZE, seed=i) for i in range(4)]
    whole, filled = run(part, x, buffers[:2], [300], [0])
    done = [mx.array(buffer) for buffer in filled]
    for start, count in [(0, 1), (1, 2), (255, 1), (256, 1), (100, 90), (299, 1)]:
        rows = x[start : start + count]
        alone, _ = run(part, rows, done, [count], [start])
        beside, _ = run(part, mx.concatenate([other, rows]), [*buffers[2:], *done], [7, count], [50, start])
        np.testing.assert_array_equal(alone, whole[start : start + count])
        np.testing.assert_array_equal(beside[7:], whole[start : start + count])


def test_a_buffer_may_begin_later_than_position_zero() -> None:
    part = attention_part(mx.float32, packed=True, rich=False, window=40)
    buffers = [random(1, KV_HEADS, CAPACITY, SIZE, seed=i) for i in range(2)]
    x = random(5, HIDDEN, seed=7)
    expected, _ = run(part, x, buffers, [5], [600])
    found, _ = run(part, x, [buffer[:, :, 512:] for buffer in buffers], [5], [600], base=512)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize("apart", [False, True], ids=["joined", "apart"])
def test_a_gated_network_is_what_its_steps_give(dtype: mx.Dtype, activation: Activation, apart: bool) -> None:
    rows = [INNER, INNER] if apart else [2 * INNER]
    gate_up = [matrix(n, HIDDEN, 10 * i, dtype, packed=True, bias=apart) for i, n in enumerate(rows)]
    after = (1 + random(HIDDEN, seed=3), 1e-5) if apart else None
    down = matrix(HIDDEN, INNER, 40, dtype, packed=True)
    part = GatedPart((1 + random(HIDDEN, seed=2), 1e-5), gate_up, down, activation, after)
    x, branch = random(280, HIDDEN, seed=8, dtype=dtype), random(280, HIDDEN, seed=9, dtype=dtype)
    expected = np.array(part.graph(x, branch).astype(mx.float32))
    found = part(x, branch)
    assert found.dtype == dtype
    tolerance = 2e-5 if dtype == mx.float32 else 0.05
    whole = np.array(found.astype(mx.float32))
    np.testing.assert_allclose(whole, expected, atol=tolerance, rtol=tolerance)
    if dtype == mx.float32:
        for start, count in [(0, 1), (3, 2), (100, 17), (279, 1)]:
            rows_ = slice(start, start + count)
            np.testing.assert_array_equal(np.array(part(x[rows_], branch[rows_])), whole[rows_])
