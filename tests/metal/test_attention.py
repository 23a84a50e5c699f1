"""The Metal attention kernel against plain MLX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from arriero.kernels import attention, device, indexed_attention
from arriero.kernels.metal import attention as metal
from tests.metal.launches import ORDERS, apart, caught, emulated, faulty, launch, runnable

pytestmark = runnable

LIMIT = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 5e-3}
NAN = mx.array(float("nan"))


def normal(*shape: int, dtype: mx.Dtype = mx.float32, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def cache(heads: int, held: int, width: int, dtype: mx.Dtype, seed: int) -> mx.array:
    """The first `held` places of a buffer with more, which nobody may read."""
    buffer = normal(1, heads, held + 3, width, dtype=dtype, seed=seed)
    buffer[:, :, held:] = NAN.astype(dtype)
    return buffer[:, :, :held]


def lists(rows: int, width: int, blocks: int, seed: int) -> mx.array:
    """Block numbers in any order, some −1, some of blocks that are not complete yet."""
    order = mx.argsort(mx.random.uniform(shape=(rows, max(width, blocks)), key=mx.random.key(seed)), axis=-1).astype(
        mx.int32
    )
    return mx.where(order < blocks, order, -1)[:, :width]


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize("order", ORDERS, ids=range(len(ORDERS)))
def test_listed_blocks_are_read_as_plain_mlx_reads_them(dtype: mx.Dtype, order: dict[str, Any]) -> None:
    rows, position, block = 6, 27, 4
    q = normal(rows, 4, 64, dtype=dtype)
    k, v = cache(2, 33, 64, dtype, 1), cache(2, 33, 32, dtype, 2)
    blocks = lists(rows, 3, 8, 3)
    made = metal.indexed(
        q, k, v, blocks, scale=0.2, position=position, block=block, launch=launch("attention", **order)
    )
    want = indexed_attention.graph(q, k[0], v[0], blocks, scale=0.2, position=position, block=block)
    assert apart(made, want) <= LIMIT[dtype]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "value_width", "rows", "position", "block", "listed"),
    [
        (1, 1, 8, 8, 1, 0, 1, 1),  # one element of everything
        (3, 1, 40, 24, 5, 9, 3, 2),  # widths and groups that no power of two divides
        (8, 2, 128, 128, 2, 200, 16, 9),  # two heads together, eight simdgroups with work
        (2, 2, 256, 512, 1, 20, 8, 2),
    ],
)
def test_listed_blocks_of_other_shapes_are_read_alike(
    heads: int, kv_heads: int, width: int, value_width: int, rows: int, position: int, block: int, listed: int
) -> None:
    q = normal(rows, heads, width)
    k, v = (
        cache(kv_heads, position + rows, width, mx.float32, 1),
        cache(kv_heads, position + rows, value_width, mx.float32, 2),
    )
    blocks = lists(rows, listed, (position + rows) // block + 1, 3)
    how: dict[str, Any] = {"scale": width**-0.5, "position": position, "block": block}
    want = indexed_attention.graph(q, k[0], v[0], blocks, **how)
    for order in ORDERS:
        assert apart(metal.indexed(q, k, v, blocks, **how, launch=launch("attention", **order)), want) <= 1e-5


def test_a_query_that_reads_no_key_gives_zeros_and_keys_outside_the_lists_are_not_read() -> None:
    q, k, v = normal(2, 2, 16), cache(2, 8, 16, mx.float32, 1), cache(2, 8, 16, mx.float32, 2)
    k[:, :, 4:] = NAN
    v[:, :, 4:] = NAN
    # Positions 6 and 7 complete no block but block 0, and no incomplete one before position 7.
    blocks = mx.array([[-1, 1], [0, -1]], mx.int32)
    made = metal.indexed(q, k, v, blocks, scale=0.3, position=6, block=4, launch=launch("attention", **ORDERS[0]))
    assert bool(mx.all(mx.isnan(made[0])))  # the incomplete block of position 6
    assert bool(mx.all(mx.isfinite(made[1])))
    nothing = mx.array([[-1, -1]], mx.int32)
    empty = metal.indexed(q[:1], k, v, nothing, scale=0.3, position=7, block=4, launch=launch("attention", **ORDERS[0]))
    assert bool(mx.all(empty == 0))


def test_the_operation_takes_the_kernel_where_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, positions = [2, 3], [7, 12]
    q = normal(5, 4, 64)
    k, v = [[cache(2, p + n, 64, mx.float32, s) for p, n in zip(positions, lengths, strict=True)] for s in (1, 2)]
    blocks = lists(5, 2, 3, 3)
    how: dict[str, Any] = {"scale": 0.2, "lengths": lengths, "positions": positions, "block": 4}
    monkeypatch.setattr(device, "native", lambda: None)
    want = indexed_attention.indexed_attention(q, k, v, blocks, **how)
    calls = taken(monkeypatch)
    made = indexed_attention.indexed_attention(q, k, v, blocks, **how)
    assert calls == ["attention", "attention"]
    assert apart(made, want) <= 1e-5
    mixed = indexed_attention.indexed_attention(q.astype(mx.bfloat16), k, v, blocks, **how)
    assert mixed.dtype == mx.bfloat16
    assert len(calls) == 2  # types that differ go to plain MLX


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "rows", "base", "held", "how"),
    [
        (1, 1, 8, 1, 0, 1, {}),
        (8, 2, 64, 3, 0, 70, {"sinks": True}),
        (4, 2, 128, 2, 5, 40, {"window": 9, "softcap": 3.0}),
        (3, 3, 24, 4, 2, 21, {"softcap": 2.0, "sinks": True}),
        (2, 1, 32, 3, 0, 12, {"causal": False}),
        (2, 1, 256, 2, 3, 30, {"window": 50}),
    ],
    ids=["one element", "sinks", "window and softcap", "softcap and sinks", "not causal", "a window wider than all"],
)
def test_keys_in_sight_are_read_as_plain_mlx_reads_them(
    dtype: mx.Dtype, heads: int, kv_heads: int, width: int, rows: int, base: int, held: int, how: dict[str, Any]
) -> None:
    q, k, v = normal(rows, heads, width, dtype=dtype), *(cache(kv_heads, held, width, dtype, s) for s in (1, 2))
    sinks = normal(heads, seed=4) if how.get("sinks") else None
    given = {"scale": width**-0.5, "position": base + held - rows, "base": base, "window": None, "softcap": None}
    given |= {"causal": True, **how, "sinks": sinks}
    # Plain MLX on its own numbers, so that only the result is rounded.
    wide = [x.astype(mx.float32) for x in (q.swapaxes(0, 1)[None], k, v)]
    want = attention.graph(*wide, **given, memo={})[0].swapaxes(0, 1).astype(dtype)
    for order in ORDERS:
        assert apart(metal.dense(q, k, v, **given, launch=launch("attention", **order)), want) <= LIMIT[dtype]


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize("order", ORDERS, ids=range(len(ORDERS)))
def test_few_queries_share_their_keys_among_threadgroups(
    monkeypatch: pytest.MonkeyPatch, dtype: mx.Dtype, order: dict[str, Any]
) -> None:
    monkeypatch.setattr(metal, "KEYS_EACH", 20)
    q, k, v = normal(2, 4, 32, dtype=dtype), cache(2, 90, 32, dtype, 1), cache(2, 90, 16, dtype, 2)
    wide = [x.astype(mx.float32) for x in (q.swapaxes(0, 1)[None], k, v)]
    kernels = {"launch": launch("attention", **order), "join": launch("attention_join", **order)}
    for how in ({"sinks": normal(4, seed=4)}, {"window": 41}):
        given = {"position": 88, "base": 0, "window": None, "softcap": None, "sinks": None, "causal": True, **how}
        want = attention.graph(*wide, scale=0.2, **given, memo={})[0].swapaxes(0, 1).astype(dtype)
        assert apart(metal.dense(q, k, v, scale=0.2, **given, **kernels), want) <= LIMIT[dtype]
    blocks = lists(2, 8, 22, 3)
    wanted = indexed_attention.graph(
        *(x.astype(mx.float32) for x in (q, k[0], v[0])), blocks, scale=0.2, position=88, block=4
    )
    made = metal.indexed(q, k, v, blocks, scale=0.2, position=88, block=4, **kernels)
    assert apart(made, wanted.astype(dtype)) <= LIMIT[dtype]


def test_a_query_without_keys_gives_zeros_from_parts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metal, "KEYS_EACH", 1)
    kernels = {"launch": launch("attention", **ORDERS[0]), "join": launch("attention_join", **ORDERS[0])}
    nothing = mx.array([[-1, -1]], mx.int32)
    q, k = normal(1, 2, 16), cache(2, 8, 16, mx.float32, 1)
    made = metal.indexed(q, k, k, nothing, scale=0.3, position=7, block=4, **kernels)
    assert bool(mx.all(made == 0))


@pytest.mark.parametrize(
    ("groups", "reads", "parts"),
    [(16, 400, 1), (16, 1100, 2), (16, 9999, 4), (64, 9999, 1), (1, 99999, 16), (99, 9999, 1)],
)
def test_keys_are_shared_where_the_grid_is_small_and_they_are_many(groups: int, reads: int, parts: int) -> None:
    assert metal._parts(groups, reads) == parts


def test_rows_with_caches_of_their_own_take_the_kernel_and_prompts_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, positions, bases = [1, 4, 17], [9, 3, 0], [2, 0, 0]
    q = normal(sum(lengths), 4, 32)
    k, v = (
        [cache(2, p + n - b, 32, mx.float32, s) for p, n, b in zip(positions, lengths, bases, strict=True)]
        for s in (1, 2)
    )
    how: dict[str, Any] = {"scale": 0.2, "lengths": lengths, "positions": positions, "bases": bases, "window": 6}
    monkeypatch.setattr(device, "native", lambda: None)
    want = attention.attention(q, k, v, **how)
    calls = taken(monkeypatch)
    assert apart(attention.attention(q, k, v, **how), want) <= 1e-5
    assert calls == ["attention", "attention"]


def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Metal's kernels on, and the names of those that are asked for."""
    calls: list[str] = []

    def asked(name: str) -> Any:
        calls.append(name)
        return launch(name, **ORDERS[0])

    monkeypatch.setattr(device, "metal", lambda: True)
    monkeypatch.setattr(metal, "kernel", asked)
    return calls


def run(edit: tuple[str, str]) -> Callable[[int], mx.array]:
    q, k, v = normal(2, 2, 64), cache(1, 12, 64, mx.float32, 1), cache(1, 12, 32, mx.float32, 2)
    kernel, blocks = faulty("attention", edit), mx.array([[1, -1], [0, 9]], mx.int32)
    return lambda seed: metal.indexed(
        q, k, v, blocks, scale=0.2, position=10, block=4, launch=lambda **call: kernel(**call, seed=seed)
    )


BARRIER = "  threadgroup_barrier(mem_flags::mem_threadgroup);\n"


@emulated
@pytest.mark.parametrize(
    ("edit", "kinds"),
    [
        (("count = dims[0]", "count = dims[0] + 1"), "out-of-bounds"),
        (("row * DV + d", "(row / 2) * DV + d"), "race"),
    ],
    ids=["a part too many", "two rows in one place"],
)
def test_planted_faults_in_bringing_parts_together_are_caught(
    monkeypatch: pytest.MonkeyPatch, edit: tuple[str, str], kinds: str
) -> None:
    monkeypatch.setattr(metal, "KEYS_EACH", 20)
    q, k = normal(1, 2, 16), cache(1, 50, 16, mx.float32, 1)
    good, bad = launch("attention"), faulty("attention_join", edit)
    how: dict[str, Any] = {"scale": 0.2, "position": 49, "launch": good}
    caught(kinds, lambda seed: metal.dense(q, k, k, **how, join=lambda **call: bad(**call, seed=seed)))


@emulated
@pytest.mark.parametrize(
    ("edit", "kinds"),
    [
        ((BARRIER, ""), ("race", "uninitialised")),
        ((BARRIER, BARRIER.replace("mem_threadgroup)", "mem_device)")), ("race",)),
        ((BARRIER, BARRIER + "  if (lane < 16)" + BARRIER), ("divergent-barrier",)),
        (("total[NSG * HG]", "total[(NSG - 1) * HG]"), ("array-bounds", "out-of-bounds")),
        (("block >= 0 && block < complete", "block >= 0"), ("out-of-bounds",)),
        (("at < HG * DV;", "at < HG * DV - 1;"), ("unwritten-output",)),
        (("if (!simd_any(key >= 0)) continue;", "if (key < 0) continue;"), ("divergence", "divergent-barrier")),
    ],
    ids=["no barrier", "a barrier for other memory", "a divergent barrier", "an array too small", "a block too far",
         "a result left out", "lanes that skip a shuffle"],
)  # fmt: skip
def test_planted_faults_are_caught(edit: tuple[str, str], kinds: tuple[str, ...]) -> None:
    message = caught(kinds, run(edit))
    assert "attention" in message
