"""Choosing and reading blocks of keys on an NVIDIA GPU, against float64."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from arriero.bench import gpu_flash_next
from arriero.kernels import block_select, indexed_attention
from arriero.kernels.cuda import indexed, indexed_choice, indexed_few
from arriero.kernels.cuda.gpu import Gpu
from arriero.model.architectures.qwen4_exp_attention import IndexedAttention
from arriero.model.architectures.qwen4_exp_config import Config
from arriero.model.contract import Batch, Span
from arriero.model.layers.rope import Rope
from tests.helpers.cuda import SEED, error, exact, executed, gpu, plain_mlx

__all__ = ["executed", "gpu"]

TOLERANCE = 5e-3
BLOCK = 4


def random(*shape: int, size: float = 1.0) -> mx.array:
    return mx.array(SEED.normal(0, size, shape).astype(np.float32)).astype(mx.bfloat16)


def whole(*shape: int) -> mx.array:
    """Small whole numbers, of which every sum of products is exact."""
    return mx.array(SEED.integers(-3, 4, shape).astype(np.float32)).astype(mx.bfloat16)


def lists(count: int, blocks: int, width: int) -> np.ndarray:
    """Rows of different block numbers, some of them -1 and, for early queries, some not complete yet."""
    rows = np.stack([SEED.permutation(max(blocks, width))[:width] for _ in range(count)])
    # The first block stays where it is listed: a query that reads nothing has no relative error.
    rows[(rows > 0) & (SEED.random(rows.shape) < 0.15) | (rows >= blocks)] = -1
    return rows.astype(np.int32)


def plain(q: mx.array, k: mx.array, v: mx.array, blocks: np.ndarray, position: int, block: int) -> np.ndarray:
    """One span's queries in double precision."""
    queries, keys, values = exact(q), exact(k)[0], exact(v)[0]
    y = np.zeros((*queries.shape[:2], values.shape[-1]))
    per = queries.shape[1] // len(keys)
    for t, row in enumerate(blocks.tolist()):
        here = position + t
        complete = (here + 1) // block
        tokens = [b * block + i for b in row if 0 <= b < complete for i in range(block)]
        tokens += range(complete * block, here + 1)
        for h in range(queries.shape[1] if tokens else 0):
            scores = keys[h // per, tokens] @ queries[t, h] * queries.shape[2] ** -0.5
            weights = np.exp(scores - scores.max())
            y[t, h] = weights @ values[h // per, tokens] / weights.sum()
    return y


def check(
    lengths: list[int],
    positions: list[int],
    *,
    heads: int = 6,
    kv_heads: int = 2,
    dim: int = 64,
    width: int = 20,
    block: int = BLOCK,
    capacity: int = 0,
    size: float = 1.0,
) -> None:
    """Spans over histories of their own, in buffers with `capacity` more places."""
    q = random(sum(lengths), heads, dim, size=size)
    ends = [p + n for p, n in zip(positions, lengths, strict=True)]
    keys, values = ([random(1, kv_heads, end + capacity, dim, size=size)[:, :, :end] for end in ends] for _ in range(2))
    tables = [lists(n, end // block, width) for n, end in zip(lengths, ends, strict=True)]
    assert indexed.takes(q, keys, values, width)
    y = indexed_attention.indexed_attention(
        q,
        keys,
        values,
        mx.array(np.concatenate(tables)),
        scale=dim**-0.5,
        lengths=lengths,
        positions=positions,
        block=block,
    )
    want, start = [], 0
    for k, v, table, length, position in zip(keys, values, tables, lengths, positions, strict=True):
        want.append(plain(q[start : start + length], k, v, table, position, block))
        start += length
    assert y.dtype == mx.bfloat16
    assert error(y, np.concatenate(want)) < TOLERANCE


@pytest.mark.parametrize("position", [0, 3, 4, 130, 1001])
def test_one_query_reads_what_is_listed_and_the_tail(gpu: Gpu, position: int) -> None:
    check([1], [position], capacity=24)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(24, 2, 256), (12, 1, 128), (8, 8, 64), (40, 2, 64)])
def test_heads_of_other_widths_and_numbers(gpu: Gpu, heads: int, kv_heads: int, dim: int) -> None:
    check([2], [300], heads=heads, kv_heads=kv_heads, dim=dim)


def test_many_queries_of_a_prompt(gpu: Gpu) -> None:
    check([37], [200], width=31)


def test_rows_have_caches_of_their_own(gpu: Gpu) -> None:
    check([1] * 11, [40 * i for i in range(11)], capacity=8)


def test_rows_bring_different_numbers_of_queries(executed: Gpu) -> None:
    check([3, 1, 9], [333, 20, 0])


@pytest.mark.parametrize("block", [1, 7])
def test_blocks_of_other_sizes(gpu: Gpu, block: int) -> None:
    check([5], [211], block=block)


def test_large_scores_don_t_overflow(gpu: Gpu) -> None:
    check([2], [150], size=20.0)


def test_a_list_of_one_block(gpu: Gpu) -> None:
    check([3], [77], width=1)


def how(lengths: list[int], positions: list[int]) -> dict[str, Any]:
    return {"scale": 64**-0.5, "block": BLOCK, "lengths": lengths, "positions": positions}


def test_keys_of_any_strides(executed: Gpu) -> None:
    q, blocks = random(2, 6, 64), mx.array(lists(2, 50, 20))
    k, v = random(1, 202, 2, 64).swapaxes(1, 2), random(1, 2, 64, 202).swapaxes(2, 3)
    y = indexed_attention.indexed_attention(q, [k], [v], blocks, **how([2], [200]))
    assert error(y, plain(q, k, v, np.array(blocks), 200, BLOCK)) < TOLERANCE


def test_unlisted_keys_are_not_read(gpu: Gpu) -> None:
    q, k, v = random(2, 6, 64), random(1, 2, 42, 64), random(1, 2, 42, 64)
    blocks = mx.array([[2, -1, 7, 10, 1 << 28]] * 2, mx.int32)
    y = indexed_attention.indexed_attention(q, [k], [v], blocks, **how([2], [40]))
    listed = np.zeros(42, bool)
    listed[[*range(8, 12), *range(28, 32), 40, 41]] = True
    broken = [mx.where(mx.array(listed)[:, None], x, mx.array(float("nan"), mx.bfloat16)) for x in (k, v)]
    again = indexed_attention.indexed_attention(q, broken[:1], broken[1:], blocks, **how([2], [40]))
    assert np.array_equal(exact(again), exact(y))
    assert error(y, plain(q, k, v, np.array([[2, -1, 7]] * 2), 40, BLOCK)) < TOLERANCE


def test_a_query_that_reads_nothing_yields_zeros(gpu: Gpu) -> None:
    q, k, v = random(3, 6, 64), random(1, 2, 9, 64), random(1, 2, 9, 64)
    y = indexed_attention.indexed_attention(q, [k], [v], mx.full((3, 4), -1, mx.int32), **how([3], [6]))
    # Position 7 completes a block, and no tail is left.
    assert (np.abs(exact(y)).max(axis=(1, 2)) > 0).tolist() == [True, False, True]


def choices(
    q: mx.array, keys: list[mx.array], lengths: list[int], positions: list[int], budget: int, block: int = BLOCK
) -> np.ndarray:
    assert indexed_choice.takes(q, keys, budget)
    found = block_select.block_select(
        q, keys, scale=0.25, lengths=lengths, positions=positions, block=block, budget=budget
    )
    assert found.dtype == mx.int32
    return np.array(found)


def best(q: mx.array, k: mx.array, positions: range, block: int, budget: int) -> list[list[int]]:
    """Exact scores, sorted in full."""
    rows = []
    for row, position in zip(exact(q), positions, strict=True):
        scores = np.maximum(row @ exact(k)[: (position + 1) // block].T, 0).sum(axis=0)
        chosen = np.sort(np.argsort(-scores, kind="stable")[:budget]).tolist()
        rows.append(chosen + [-1] * (budget - len(chosen)))
    return rows


@pytest.mark.parametrize(
    ("lengths", "positions", "heads", "width", "block"),
    [
        ([1], [3001], 4, 128, 4),
        ([40], [0], 4, 32, 4),
        ([19, 1, 7], [300, 77, 0], 2, 64, 1),
        ([1] * 9, [90 * i for i in range(9)], 8, 32, 7),
        ([33], [2100], 1, 32, 4),
    ],
)
def test_choices_equal_a_full_sort(
    gpu: Gpu, lengths: list[int], positions: list[int], heads: int, width: int, block: int
) -> None:
    q = whole(sum(lengths), heads, width)
    keys = [whole((p + n) // block + 3, width) for p, n in zip(positions, lengths, strict=True)]
    got = choices(q, keys, lengths, positions, 25, block)
    start, want = 0, []
    for k, length, position in zip(keys, lengths, positions, strict=True):
        want += best(q[start : start + length], k, range(position, position + length), block, 25)
        start += length
    assert got.tolist() == want


def test_keys_of_blocks_are_read_where_they_are(executed: Gpu) -> None:
    q, rows = whole(2, 4, 32), whole(1, 1, 512, 32)
    every = rows[0, 0, BLOCK - 1 :: BLOCK]
    want = best(q, every, range(400, 402), BLOCK, 10)
    assert choices(q, [every], [2], [400], 10).tolist() == want
    turned = mx.contiguous(every.T).T
    assert choices(q, [turned], [2], [400], 10).tolist() == want


def test_equal_scores_and_none_at_all(executed: Gpu) -> None:
    q = mx.ones((1, 4, 32), mx.bfloat16)
    # Every product is below zero, so all scores are zero.
    assert choices(q, [-mx.ones((500, 32), mx.bfloat16)], [1], [1999], 30).tolist() == [list(range(30))]
    keys = mx.zeros((500, 32), mx.bfloat16)
    keys[17], keys[400] = float("nan"), 1.0
    assert choices(q, [keys], [1], [1999], 3).tolist() == [[0, 1, 400]]


def test_a_chunk_of_queries_or_their_number_changes_no_choice(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    q, keys = random(40, 4, 32), [random(160, 32)]
    together = choices(q, keys, [40], [600], 12)
    monkeypatch.setattr(indexed_choice, "SCRATCH", 1)
    assert np.array_equal(choices(q, keys, [40], [600], 12), together)
    alone = [choices(q[i : i + 1], keys, [1], [600 + i], 12) for i in range(0, 40, 7)]
    assert np.array_equal(np.concatenate(alone), together[::7])


@pytest.fixture(scope="module")
def layer() -> Any:
    """One layer of indexed attention, heads of 64, whose queries may miss blocks from the 36th token on."""
    small = {
        "vocab_size": 64,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "head_dim": 64,
        "indexer_head_dim": 64,
        "indexer_budget": 32,
        "ple_layer_ids": [],
    }
    values = gpu_flash_next.config(4, **small)
    values["rope_parameters"] = values["rope_parameters"] | {"partial_rotary_factor": 1.0}
    read = Config.read(values)
    files = gpu_flash_next.checkpoint(values)
    rope = Rope(read.rope, read.shape.head_dim)
    how = {"eps": read.shape.eps, "baked": False}
    return IndexedAttention.load(
        files, "model.layers.3.self_attn", mx.bfloat16, read.attention, read.index, rope, **how
    )


def run(layer: Any, pieces: list[list[int]], hidden: list[mx.array]) -> tuple[list[mx.array], list[list[mx.array]]]:
    """Results of forwards of `pieces[step][row]` tokens, and what the rows' caches hold in the end."""
    caches = [(layer.main.new_cache(), layer.indexer.new_cache()) for _ in hidden]
    made = []
    for lengths in pieces:
        spans, parts, start = [], [], 0
        for row, length in enumerate(lengths):
            position = caches[row][0].offset
            if length:
                spans.append(Span(start, length, position, caches[row]))
                parts.append(hidden[row][position : position + length])
                start += length
        made.append(layer(mx.concatenate(parts), Batch(mx.zeros((start,), mx.int32), spans), 0, 1))
        mx.eval(made[-1], [array for row in caches for cache in row for array in cache.state()])
    return made, [[*k.range(0, k.offset), i.range(0, i.offset)[0]] for k, i in caches]


@pytest.mark.parametrize(
    "pieces",
    [
        [[1], [2], [4], [7], [16], [16], [3], [1], [1], [1], [1]],
        [[60, 0, 5], [1, 1, 1], [3, 1, 2], [1, 5, 1], [1, 1, 1]],
        [[9] * 9, [1] * 9],
    ],
)
def test_a_layer_of_few_tokens_is_the_graphs(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, layer: Any, pieces: list[list[int]]
) -> None:
    hidden = [random(sum(step[row] for step in pieces), 128) for row in range(len(pieces[0]))]
    taken = []
    attend = indexed_few.attend

    def spy(*args: Any, **how: Any) -> Any:
        taken.append(how["lengths"])
        return attend(*args, **how)

    monkeypatch.setattr(indexed_few, "attend", spy)
    ours, held = run(layer, pieces, hidden)
    assert len(taken) == sum(max(step) <= 32 for step in pieces)
    with plain_mlx(monkeypatch):
        plain, kept = run(layer, pieces, hidden)
        mx.eval(plain, kept)
    for a, b in zip(ours, plain, strict=True):
        # Both round to bfloat16 at other places, five times on the way.
        assert error(a, exact(b)) < 2e-2
    for mine, theirs in zip(held, kept, strict=True):
        for x, y in zip(mine, theirs, strict=True):
            assert error(x, exact(y)) < TOLERANCE
