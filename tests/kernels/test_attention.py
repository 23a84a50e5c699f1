"""Attention of packed spans against a double-precision loop, and against itself to the bit."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from arriero.kernels import attention as module
from arriero.kernels.attention import attention

pytestmark = pytest.mark.usefixtures("kernels")

HEADS, KV_HEADS, WIDTH = 4, 2, 16
SCALE = WIDTH**-0.5


def random(*shape: int, seed: int = 0, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def plain(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    position: int,
    base: int = 0,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    causal: bool = True,
) -> np.ndarray:
    """One span, one query at a time, in double precision."""
    queries, keys, values = (np.array(a.astype(mx.float32)).astype(np.float64) for a in (q, k[0], v[0]))
    out = np.zeros((queries.shape[0], queries.shape[1], values.shape[-1]))
    for t in range(queries.shape[0]):
        at = position + t
        seen = [p for p in range(base, base + keys.shape[1]) if not causal or p <= at]
        seen = [p - base for p in seen if window is None or p > at - window]
        for h in range(queries.shape[1]):
            group = h // (queries.shape[1] // keys.shape[0])
            scores = keys[group, seen] @ queries[t, h] * SCALE
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            extra = [] if sinks is None else [float(sinks[h])]
            weights = np.exp(np.concatenate([scores, extra]) - max([*scores, *extra]))
            weights = weights[: len(seen)] / weights.sum()
            out[t, h] = weights @ values[group, seen]
    return out


OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 5},
    {"window": 300},
    {"softcap": 1.5},
    {"softcap": 1.5, "window": 7},
    {"sinks": mx.array([0.5, -1.0, 2.0, 0.0])},
    {"sinks": mx.array([0.5, -1.0, 2.0, 0.0]), "window": 7},
    {"sinks": mx.array([0.5, -1.0, 2.0, 0.0]), "softcap": 1.5},
    {"causal": False},
    {"causal": False, "window": 7},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
def test_spans_attend_to_their_own_histories(options: dict[str, Any]) -> None:
    lengths, positions = [7, 1, 20], [0, 33, 280]
    keys = [random(1, KV_HEADS, p + n, WIDTH, seed=i) for i, (n, p) in enumerate(zip(lengths, positions, strict=True))]
    values = [random(1, KV_HEADS, k.shape[2], 24, seed=10 + i) for i, k in enumerate(keys)]
    q = random(28, HEADS, WIDTH, seed=20)
    found = np.array(attention(q, keys, values, scale=SCALE, lengths=lengths, positions=positions, **options))
    start = 0
    for k, v, n, p in zip(keys, values, lengths, positions, strict=True):
        np.testing.assert_allclose(found[start : start + n], plain(q[start : start + n], k, v, p, **options), atol=2e-6)
        start += n


def test_a_history_may_begin_later_than_position_zero() -> None:
    k, v, q = random(1, KV_HEADS, 60, WIDTH), random(1, KV_HEADS, 60, WIDTH, seed=1), random(10, HEADS, WIDTH, seed=2)
    found = attention(q, [k], [v], scale=SCALE, lengths=[10], positions=[562], bases=[512], window=30)
    np.testing.assert_allclose(np.array(found), plain(q, k, v, 562, 512, window=30), atol=2e-6)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
def test_sixteen_bits_stay_sixteen_bits(dtype: mx.Dtype, options: dict[str, Any]) -> None:
    k, v = random(1, KV_HEADS, 20, WIDTH, dtype=dtype), random(1, KV_HEADS, 20, WIDTH, seed=1, dtype=dtype)
    q = random(12, HEADS, WIDTH, seed=2, dtype=dtype)
    found = attention(q, [k], [v], scale=SCALE, lengths=[12], positions=[8], **options)
    assert found.dtype == dtype
    np.testing.assert_allclose(np.array(found.astype(mx.float32)), plain(q, k, v, 8, **options), atol=3e-2)


@pytest.mark.parametrize("options", [o for o in OPTIONS if "causal" not in o], ids=lambda o: "-".join(o) or "plain")
@pytest.mark.parametrize("width", [16, 64, 80])
def test_a_query_has_the_same_bits_in_any_chunk(options: dict[str, Any], width: int) -> None:
    total = 600
    k, v = random(1, KV_HEADS, total, width), random(1, KV_HEADS, total, width, seed=1)
    q = random(total, HEADS, width, seed=2)
    together = np.array(attention(q, [k], [v], scale=SCALE, lengths=[total], positions=[0], **options))
    for start, count in [(0, 1), (5, 1), (17, 3), (255, 1), (256, 1), (257, 2), (250, 100), (511, 1), (599, 1)]:
        end = start + count
        part = attention(
            q[start:end], [k[:, :, :end]], [v[:, :, :end]], scale=SCALE, lengths=[count], positions=[start], **options
        )
        np.testing.assert_array_equal(np.array(part), together[start:end])


@pytest.mark.parametrize("options", [{"window": 40}, {"window": 40, "softcap": 2.0}], ids=["plain", "softcap"])
def test_a_query_has_the_same_bits_where_old_keys_were_dropped(options: dict[str, Any]) -> None:
    total = 700
    k, v = random(1, KV_HEADS, total, WIDTH), random(1, KV_HEADS, total, WIDTH, seed=1)
    q = random(total, HEADS, WIDTH, seed=2)
    together = np.array(attention(q, [k], [v], scale=SCALE, lengths=[total], positions=[0], **options))
    for start, count, base in [
        (600, 1, 512),
        (600, 100, 512),
        (551, 3, 512),
        (552, 1, 512),
        (520, 9, 256),
        (699, 1, 0),
    ]:
        end = start + count
        held = (slice(None), slice(None), slice(base, end))
        part = attention(
            q[start:end],
            [k[held]],
            [v[held]],
            scale=SCALE,
            lengths=[count],
            positions=[start],
            bases=[base],
            **options,
        )
        np.testing.assert_array_equal(np.array(part), together[start:end])


def test_a_span_has_the_same_bits_beside_others() -> None:
    ks = [random(1, KV_HEADS, n, WIDTH, seed=n) for n in (40, 300, 9)]
    vs = [random(1, KV_HEADS, n, WIDTH, seed=100 + n) for n in (40, 300, 9)]
    lengths, positions = [40, 1, 3], [0, 299, 6]
    q = random(44, HEADS, WIDTH, seed=2)
    together = np.array(attention(q, ks, vs, scale=SCALE, lengths=lengths, positions=positions))
    start = 0
    for k, v, n, p in zip(ks, vs, lengths, positions, strict=True):
        alone = attention(q[start : start + n], [k], [v], scale=SCALE, lengths=[n], positions=[p])
        np.testing.assert_array_equal(np.array(alone), together[start : start + n])
        start += n


@pytest.mark.parametrize("heads", [16, 20, 23, 64])
def test_many_query_heads_may_share_one_head_that_is_key_and_value(heads: int) -> None:
    """As latent attention has it: the values are the front of the keys."""
    q, k = random(5, heads, 24), random(1, 1, 600, 24, seed=1)
    lengths, positions = [1, 4], [599, 300]

    def run(q: mx.array, lengths: list[int], positions: list[int], held: list[int]) -> mx.array:
        keys = [k[:, :, :count] for count in held]
        values = [part[..., :16] for part in keys]
        return attention(q, keys, values, scale=SCALE, lengths=lengths, positions=positions)

    y = run(q, lengths, positions, [600, 304])
    np.testing.assert_allclose(np.array(y[:1]), plain(q[:1], k, k[..., :16], 599), atol=1e-5)
    np.testing.assert_allclose(np.array(y[1:]), plain(q[1:], k[:, :, :304], k[:, :, :304, :16], 300), atol=1e-5)
    for row in range(1, 5):
        alone = run(q[row : row + 1], [1], [299 + row], [300 + row])
        np.testing.assert_array_equal(np.array(alone), np.array(y[row : row + 1]))


def test_spans_that_do_not_add_up_are_refused() -> None:
    k = random(1, KV_HEADS, 4, WIDTH)
    with pytest.raises(ValueError, match="spans hold 3 queries, but 4"):
        attention(random(4, HEADS, WIDTH), [k], [k], scale=SCALE, lengths=[3], positions=[0])


@pytest.mark.parametrize("options", [{}, {"window": 40}, {"softcap": 2.0}], ids=["plain", "window", "softcap"])
def test_long_prompts_run_by_blocks_of_queries_with_the_same_bits(
    options: dict[str, Any], kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels == "native":
        pytest.skip("blocks are the graph version's")
    k, v = random(1, KV_HEADS, 500, WIDTH), random(1, KV_HEADS, 500, WIDTH, seed=1)
    q = random(500, HEADS, WIDTH, seed=2)
    whole = np.array(attention(q, [k], [v], scale=SCALE, lengths=[500], positions=[0], **options))
    scores: list[int] = []
    block = module._block

    def counted(queries: mx.array, keys: mx.array, *rest: Any) -> mx.array:
        scores.append(queries.shape[1] * queries.shape[2] * keys.shape[2])
        return block(queries, keys, *rest)

    monkeypatch.setattr(module, "SCORE_BUDGET", 100_000)
    monkeypatch.setattr(module, "_block", counted)
    blocks = np.array(attention(q, [k], [v], scale=SCALE, lengths=[500], positions=[0], **options))
    np.testing.assert_array_equal(blocks, whole)
    assert len(scores) == 10
    assert max(scores) <= 100_000
