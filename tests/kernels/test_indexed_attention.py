"""Attention over listed blocks against double precision, and against itself to the bit."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from arriero.kernels import indexed_attention as module
from arriero.kernels.attention import attention
from arriero.kernels.block_select import dense_until
from arriero.kernels.indexed_attention import indexed_attention
from tests.helpers.bits import same

pytestmark = pytest.mark.usefixtures("kernels")

HEADS, KV_HEADS, WIDTH, BLOCK = 6, 2, 20, 4
SCALE = WIDTH**-0.5
HOW: dict[str, Any] = {"scale": SCALE, "block": BLOCK}


def random(*shape: int, seed: int = 0, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def lists(count: int, blocks: int, width: int, seed: int = 0) -> mx.array:
    """Rows of different block numbers, some of them -1 and, for early queries, some not complete yet."""
    rng = np.random.default_rng(seed)
    rows = np.stack([rng.permutation(max(blocks, width))[:width] for _ in range(count)])
    rows[(rng.random(rows.shape) < 0.15) | (rows >= blocks)] = -1
    return mx.array(rows.astype(np.int32))


def plain(q: mx.array, k: mx.array, v: mx.array, blocks: mx.array, position: int, block: int = BLOCK) -> np.ndarray:
    queries, keys, values = (np.array(x.astype(mx.float32)).astype(np.float64) for x in (q, k[0], v[0]))
    y = np.zeros((*queries.shape[:2], values.shape[-1]))
    for t, row in enumerate(blocks.tolist()):
        here = position + t
        complete = (here + 1) // block
        tokens = [b * block + i for b in row if 0 <= b < complete for i in range(block)]
        tokens += range(complete * block, here + 1)
        for h in range(queries.shape[1] if tokens else 0):
            kv = h // (queries.shape[1] // len(keys))
            scores = keys[kv, tokens] @ queries[t, h] * queries.shape[2] ** -0.5
            weights = np.exp(scores - scores.max())
            y[t, h] = weights @ values[kv, tokens] / weights.sum()
    return y


def error(got: mx.array, want: np.ndarray) -> float:
    difference = np.array(got.astype(mx.float32)).astype(np.float64) - want
    return float(np.linalg.norm(difference, axis=-1).max() / np.linalg.norm(want, axis=-1).max())


@pytest.mark.parametrize(("dtype", "bound"), [(mx.float32, 4e-6), (mx.bfloat16, 4e-3), (mx.float16, 6e-4)])
@pytest.mark.parametrize(("block", "value_width"), [(4, WIDTH), (1, 33), (7, 64)])
def test_rows_are_those_of_the_listed_keys(dtype, bound, block, value_width):
    lengths, positions = [5, 1, 11], [700, 333, 0]
    q = random(17, HEADS, WIDTH, dtype=dtype)
    keys = [random(1, KV_HEADS, p + n, WIDTH, seed=p, dtype=dtype) for p, n in zip(positions, lengths, strict=True)]
    values = [
        random(1, KV_HEADS, p + n, value_width, seed=p + 1, dtype=dtype)
        for p, n in zip(positions, lengths, strict=True)
    ]
    tables = [lists(n, (p + n) // block, 90, seed=p) for p, n in zip(positions, lengths, strict=True)]
    y = indexed_attention(
        q, keys, values, mx.concatenate(tables), scale=SCALE, block=block, lengths=lengths, positions=positions
    )
    assert y.dtype == dtype
    start, want = 0, []
    for k, v, table, length, position in zip(keys, values, tables, lengths, positions, strict=True):
        want.append(plain(q[start : start + length], k, v, table, position, block))
        start += length
    assert error(y, np.concatenate(want)) < bound


def test_with_every_block_listed_it_is_causal_attention():
    count, budget = 30, 40
    position = dense_until(BLOCK, budget) - count
    q, k, v = random(count, HEADS, WIDTH), random(1, KV_HEADS, position + count, WIDTH), random(1, KV_HEADS, 163, WIDTH)
    assert position + count == 163
    blocks = mx.broadcast_to(mx.arange(budget, dtype=mx.int32), (count, budget))
    y = indexed_attention(q, [k], [v], blocks, lengths=[count], positions=[position], **HOW)
    dense = attention(q, [k], [v], scale=SCALE, lengths=[count], positions=[position])
    assert error(y, np.array(dense).astype(np.float64)) < 4e-6


def test_unlisted_keys_are_not_read():
    q, k, v = random(2, HEADS, WIDTH), random(1, KV_HEADS, 42, WIDTH), random(1, KV_HEADS, 42, WIDTH)
    blocks = mx.array([[2, -1, 7], [2, -1, 7]], mx.int32)
    y = indexed_attention(q, [k], [v], blocks, lengths=[2], positions=[40], **HOW)
    listed = mx.zeros((42,), mx.bool_)
    listed[mx.array([*range(8, 12), *range(28, 32), 40, 41])] = True
    broken = [mx.where(listed[:, None], x, mx.nan) for x in (k, v)]
    assert same(indexed_attention(q, broken[:1], broken[1:], blocks, lengths=[2], positions=[40], **HOW), y)


def test_blocks_that_are_not_complete_are_passed_over():
    q, k, v = random(1, HEADS, WIDTH), random(1, KV_HEADS, 40, WIDTH), random(1, KV_HEADS, 40, WIDTH)
    some = indexed_attention(q, [k], [v], mx.array([[1, -1, -1, -1]]), lengths=[1], positions=[10], **HOW)
    future = indexed_attention(q, [k], [v], mx.array([[1, 2, 9, 1 << 28]]), lengths=[1], positions=[10], **HOW)
    assert error(future, np.array(some).astype(np.float64)) < 1e-6


def test_a_query_that_reads_nothing_yields_zeros():
    q, k, v = random(3, HEADS, WIDTH), random(1, KV_HEADS, 9, WIDTH), random(1, KV_HEADS, 9, WIDTH)
    y = indexed_attention(q, [k], [v], mx.full((3, 4), -1, mx.int32), lengths=[3], positions=[6], **HOW)
    read = np.abs(np.array(y)).max(axis=(1, 2)) > 0
    assert read.tolist() == [True, False, True]  # position 7 completes a block, and no tail is left
    assert np.isfinite(np.array(y)).all()


def test_huge_scores_stay_finite():
    q, k, v = random(1, HEADS, WIDTH) * 1e6, random(1, KV_HEADS, 41, WIDTH) * 1e6, random(1, KV_HEADS, 41, WIDTH)
    blocks = lists(1, 10, 6)
    y = indexed_attention(q, [k], [v], blocks, lengths=[1], positions=[40], **HOW)
    assert error(y, plain(q, k, v, blocks, 40)) < 4e-6


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(0, 500))
def test_any_cut_of_a_sequence_gives_the_same_bits(pieces, position):
    total = sum(pieces)
    q, blocks = random(total, HEADS, WIDTH), lists(total, (position + total) // BLOCK, 70, seed=total)
    k, v = (random(1, KV_HEADS, position + total, WIDTH, seed=s) for s in (1, 2))
    whole = indexed_attention(q, [k], [v], blocks, lengths=[total], positions=[position], **HOW)
    start, rows = 0, []
    for length in pieces:
        part, end = slice(start, start + length), position + start + length
        rows.append(
            indexed_attention(
                q[part],
                [k[:, :, :end]],
                [v[:, :, :end]],
                blocks[part],
                lengths=[length],
                positions=[position + start],
                **HOW,
            )
        )
        start += length
    assert same(mx.concatenate(rows), whole)


@pytest.mark.parametrize("counts", [[1, 1, 1], [2, 30, 1]])
def test_company_does_not_change_a_span(counts):
    positions = [300 + 70 * i for i in range(len(counts))]
    q = random(sum(counts), HEADS, WIDTH)
    keys = [random(1, KV_HEADS, p + n, WIDTH, seed=p) for p, n in zip(positions, counts, strict=True)]
    tables = [lists(n, p // BLOCK, 70, seed=p) for p, n in zip(positions, counts, strict=True)]
    together = indexed_attention(q, keys, keys, mx.concatenate(tables), lengths=counts, positions=positions, **HOW)
    start = 0
    for k, table, count, position in zip(keys, tables, counts, positions, strict=True):
        alone = indexed_attention(
            q[start : start + count], [k], [k], table, lengths=[count], positions=[position], **HOW
        )
        assert same(alone, together[start : start + count])
        start += count


def test_tiles_do_not_change_a_row(monkeypatch):
    q, k, v = random(9, HEADS, WIDTH), random(1, KV_HEADS, 209, WIDTH), random(1, KV_HEADS, 209, WIDTH)
    blocks = lists(9, 50, 20)
    whole = indexed_attention(q, [k], [v], blocks, lengths=[9], positions=[200], **HOW)
    monkeypatch.setattr(module, "GATHER_BUDGET", 2 * (20 * BLOCK + 3) * KV_HEADS * 2 * WIDTH)
    assert same(indexed_attention(q, [k], [v], blocks, lengths=[9], positions=[200], **HOW), whole)


def test_keys_are_taken_from_a_larger_buffer():
    q, blocks = random(2, HEADS, WIDTH), lists(2, 50, 20)
    k, v = random(1, 256, KV_HEADS, WIDTH).swapaxes(1, 2), random(1, KV_HEADS, 256, WIDTH)
    y = indexed_attention(q, [k[:, :, :202]], [v[:, :, :202]], blocks, lengths=[2], positions=[200], **HOW)
    copies = [mx.contiguous(x[:, :, :202]) for x in (k, v)]
    assert same(y, indexed_attention(q, copies[:1], copies[1:], blocks, lengths=[2], positions=[200], **HOW))


def test_what_does_not_fit_is_refused():
    q, k, blocks = random(3, HEADS, WIDTH), random(1, KV_HEADS, 50, WIDTH), lists(3, 12, 5)
    with pytest.raises(ValueError, match="but 3 queries"):
        indexed_attention(q, [k], [k], blocks, lengths=[2], positions=[40], **HOW)
    with pytest.raises(ValueError, match="but 3 queries"):
        indexed_attention(q, [k], [k], blocks[:2], lengths=[3], positions=[40], **HOW)
    with pytest.raises(ValueError, match="do not reach the query at position 50"):
        indexed_attention(q, [k], [k], blocks, lengths=[3], positions=[48], **HOW)
