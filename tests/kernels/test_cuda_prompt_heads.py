"""What is between the products of a prompt on an NVIDIA GPU, against float64 and plain MLX."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from arriero.bench.gpu_models import random_model
from arriero.kernels import attention as plain_attention
from arriero.kernels import prompt_attention as prompts
from arriero.kernels.activation import Activation, gated, gated_rows
from arriero.kernels.attention_part import AttentionPart
from arriero.kernels.cuda import gate_rows, prompt_heads, sum_norm
from arriero.kernels.cuda import gated_norm as gated_norm_kernel
from arriero.kernels.cuda.attention import REPLAYED, Shape
from arriero.kernels.cuda.gpu import Gpu
from arriero.kernels.cuda.heads import Form
from arriero.kernels.gated_norm import gated_norm
from arriero.kernels.matrix import Matrix
from arriero.kernels.rms_norm import add_rms_norm, rms_norm
from arriero.kernels.rope import normed_rope
from arriero.model.contract import Batch, Span
from arriero.model.layers import rope as rope_module
from arriero.model.layers.rope import Rope, RopeConfig
from arriero.model.quantization import Quantization
from arriero.runner.caches.full import KVCache
from tests.helpers.cuda import ON_GPU, error, exact, executed, packed, plain_mlx, rows
from tests.kernels.test_cuda_attention import rounded
from tests.kernels.test_cuda_engine import MODELS

__all__ = ["executed"]

EPS = 1e-6
FAR = 65_500


def gain(width: int, *, wide: bool = False) -> mx.array:
    return (1 + 0.2 * rows(1, width)[0].astype(mx.float32)).astype(mx.float32 if wide else mx.bfloat16)


def buffer(heads: int, capacity: int, width: int) -> mx.array:
    return mx.contiguous(rows(heads * capacity, width).reshape(1, heads, capacity, width))


def normed(x: np.ndarray, by: np.ndarray | float) -> np.ndarray:
    return rounded(x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * by)


def turned(x: np.ndarray, table: np.ndarray, *, interleaved: bool) -> np.ndarray:
    """Heads `[T, heads, D]` in float64, by angles `[T, R / 2, 2]`."""
    half = table.shape[1]
    cos, sin = table[:, None, :, 0].astype(float), table[:, None, :, 1].astype(float)
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    )
    y = x.copy()
    y[..., first] = x[..., first] * cos - x[..., second] * sin
    y[..., second] = x[..., second] * cos + x[..., first] * sin
    return rounded(y)


@pytest.mark.parametrize(
    ("shape", "form", "half", "wide", "interleaved", "norms"),
    [
        (Shape(5, 2, 64, 1.0), Form(), 32, False, False, True),
        (Shape(3, 1, 256, 1.0), Form(gated=True), 32, True, False, True),
        (Shape(2, 1, 512, 1.0), Form(keys_are_values=True, normed_values=True), 256, False, False, True),
        (Shape(3, 2, 128, 1.0), Form(), 32, False, True, False),
        pytest.param(Shape(32, 8, 128, 1.0), Form(), 64, False, False, True, marks=ON_GPU),
        pytest.param(Shape(16, 8, 256, 1.0), Form(normed_values=True), 128, False, False, True, marks=ON_GPU),
        pytest.param(Shape(4, 4, 64, 1.0), Form(), 0, False, False, False, marks=ON_GPU),
        pytest.param(Shape(8, 2, 512, 1.0), Form(), 128, True, True, True, marks=ON_GPU),
    ],
)
def test_heads_are_normed_turned_and_put_where_they_belong(
    executed: Gpu, shape: Shape, form: Form, half: int, wide: bool, interleaved: bool, norms: bool
) -> None:
    total, first, count, place, spare, capacity, dim = 9, 2, 5, 3, (2, 1), 16, shape.head_dim
    kinds = 1 if form.keys_are_values else 2
    x = rows(total, ((2 if form.gated else 1) * shape.heads + kinds * shape.kv_heads) * dim)
    gains = [gain(dim, wide=wide) for _ in "qk"]
    pairs = [(g, EPS) if norms else None for g in gains]
    # Far from the start, where an angle that is not computed in double precision is another one.
    table = Rope(RopeConfig(1e6), 2 * half).table(np.arange(FAR, FAR + total)) if half else None
    angles = None if table is None else mx.array(table)
    buffers = [buffer(shape.kv_heads, capacity, dim) for _ in "kv"]
    mx.eval(x, gains, buffers)
    before = [exact(b)[0] for b in buffers]
    memo: dict[Any, Any] = {}
    assert prompt_heads.takes(shape, form, buffers, angles, pairs, memo, interleaved=interleaved)
    where: dict[str, Any] = {"first": first, "count": count, "place": place, "spare": spare, "memo": memo}
    q, filled = prompt_heads.prepare(
        shape, form, x, angles, buffers, query_norm=pairs[0], key_norm=pairs[1], interleaved=interleaved, **where
    )
    mine = exact(x)[first : first + count].reshape(count, -1, dim)
    edge = shape.heads * (2 if form.gated else 1)
    queries = mine[:, 0:edge:2] if form.gated else mine[:, :edge]
    keys, values = mine[:, edge : edge + shape.kv_heads], mine[:, -shape.kv_heads :]
    if norms:
        queries, keys = normed(queries, exact(gains[0])), normed(keys, exact(gains[1]))
    if form.normed_values:
        values = normed(values, 1.0)
    if table is not None:
        turns = table[first : first + count]
        queries, keys = (turned(part, turns, interleaved=interleaved) for part in (queries, keys))
    wanted = np.zeros((sum(spare) + count, shape.heads, dim))
    wanted[spare[0] : spare[0] + count] = queries
    assert error(q, wanted) < 1e-3
    assert not np.any(exact(q)[[0, 1, -1]])
    for found, old, new in zip(filled, before, (keys, values), strict=True):
        old[:, place : place + count] = new.swapaxes(0, 1)
        assert error(found, old[None]) < 1e-3
        assert np.array_equal(exact(found)[0, :, :place], old[:, :place])


@pytest.mark.parametrize(("norm", "interleaved"), [(True, False), (False, True)])
def test_heads_of_many_tokens_alone(
    executed: Gpu, monkeypatch: pytest.MonkeyPatch, norm: bool, interleaved: bool
) -> None:
    # Every other head of a row, as where gates stand between them.
    x = rows(33, 3 * 2 * 64).reshape(33, 3, 128)[..., :64]
    by = (gain(64, wide=True), EPS) if norm else None
    angles = mx.array(Rope(RopeConfig(1e4), 32).table(np.arange(33)))
    with plain_mlx(monkeypatch):
        expected = normed_rope(x, by, angles, interleaved=interleaved)
        mx.eval(expected)
    monkeypatch.setattr(mx.fast, "rms_norm", lambda *_: pytest.fail("plain operations took the norm"))
    assert error(normed_rope(x, by, angles, interleaved=interleaved), exact(expected)) < 3e-3


@pytest.mark.parametrize(
    ("lengths", "positions", "bases", "window", "softcap"),
    [([40], [300], [256], 100, None), ([35, 1], [0, 70], [0, 0], None, None), ([33], [5], [0], None, 20.0)],
)
def test_the_attention_of_a_prompt_is_that_of_plain_operations(
    executed: Gpu,
    monkeypatch: pytest.MonkeyPatch,
    lengths: list[int],
    positions: list[int],
    bases: list[int],
    window: int | None,
    softcap: float | None,
) -> None:
    width, dim, heads, kv_heads, count = 64, 64, 4, 2, sum(lengths)
    weights = rows((heads + 2 * kv_heads) * dim, width, 0.1), rows(width, heads * dim, 0.1)
    gains = [gain(width), gain(dim), gain(dim)]

    def made(dtype: mx.Dtype) -> AttentionPart:
        names = zip(("before", "query_norm", "key_norm"), gains, strict=True)
        norms: dict[str, Any] = {name: (by.astype(dtype), EPS) for name, by in names}
        qkv, out = (Matrix(w.astype(dtype)) for w in weights)
        return AttentionPart([qkv], out, heads, kv_heads, dim, dim**-0.5, window=window, softcap=softcap, **norms)

    x = rows(count, width)
    spots = [np.arange(p, p + n) for p, n in zip(positions, lengths, strict=True)]
    angles = mx.array(Rope(RopeConfig(1e4), dim).table(np.concatenate(spots)))
    held = [buffer(kv_heads, 512, dim) for _ in lengths for _ in "kv"]
    mx.eval(x, angles, held)
    where: dict[str, Any] = {"lengths": lengths, "positions": positions, "bases": bases}
    with plain_mlx(monkeypatch):
        wide = [array.astype(mx.float32) for array in (x, *held)]
        expected, kept = made(mx.float32).graph(wide[0], angles, wide[1:], **where, memo={})
        plain, _ = made(mx.bfloat16).graph(x, angles, [b + 0 for b in held], **where, memo={})
        mx.eval(expected, kept, plain)
    seen = []
    monkeypatch.setattr(prompts, "attend", lambda *a, real=prompts.attend, **how: seen.append(1) or real(*a, **how))
    y, filled = made(mx.bfloat16)(x, angles, held, **where, memo={})
    assert seen
    # Three roundings to bfloat16 stand between x and y, whoever computes them.
    assert error(y, exact(expected)) < max(5e-3, 1.05 * error(plain, exact(expected)))
    for ours, theirs in zip(filled, kept, strict=True):
        assert error(ours, exact(theirs)) < 3e-3


def test_a_prompt_written_in_place_leaves_a_stored_prefix_alone(executed: Gpu) -> None:
    shape, cache = Shape(2, 1, 64, 0.125), KVCache(1, 64, 64, mx.bfloat16)

    def write(count: int) -> None:
        keys, values, base = cache.reserve(count)
        where: dict[str, Any] = {"lengths": [count], "positions": [cache.offset], "bases": [base]}
        none: dict[str, Any] = {"query_norm": None, "key_norm": None, "memo": {}}
        y, filled = prompts.attend(
            shape, prompts.PLAIN, rows(count, shape.width), None, [keys, values], **where, **none
        )
        cache.commit(*filled, count)
        mx.eval(y)

    write(40)
    stored = cache.snapshot()
    assert stored is not None
    before = [exact(array) for pair in stored.arrays() for array in pair]
    assert cache.rewind(10)
    write(40)
    after = [exact(array) for pair in stored.arrays() for array in pair]
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    assert not np.array_equal(exact(cache.state()[0])[:, :, 10:40], before[0][:, :, 10:40])


@pytest.mark.parametrize("name", ["dense", "recurrent"])
def test_prompts_of_models_give_what_plain_operations_give(
    executed: Gpu, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model = random_model(MODELS[name], Quantization("nvfp4", 4, 16))

    def final() -> mx.array:
        caches, states = model.new_caches(), []
        for at, count in ((0, 37), (37, 34)):
            batch = Batch(mx.arange(at, at + count, dtype=mx.int32) % 96, [Span(0, count, at, caches)])
            states.append(model.forward(batch).final)
        made = mx.concatenate(states)
        mx.eval(made)
        return made

    ours = final()
    off = lambda *_, **how: False  # noqa: E731
    for module, function in (
        *((m, "takes") for m in (prompts, gate_rows, gated_norm_kernel, sum_norm)),
        (prompt_heads, "turns"),
    ):
        monkeypatch.setattr(module, function, off)
    assert error(ours, exact(final())) < 2e-2


def test_angles_of_prompts_are_those_of_the_table(executed: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rope_module, "DEVICE_BLOCKS", 2)
    rope = Rope(RopeConfig(1e6), 64)
    for spans in ([(40, 1000)], [(30, 3), (2100, FAR)], [(33, 0)]):
        starts = np.cumsum([0, *(length for length, _ in spans)])
        placed = [Span(int(start), *at, []) for start, at in zip(starts[:-1], spans, strict=True)]
        batch = Batch(mx.zeros(int(starts[-1]), mx.int32), placed)
        assert np.array_equal(np.array(rope.angles(batch)), rope.table(batch.positions))


@pytest.mark.parametrize("width", [1032, 64])
def test_a_norm_with_a_wide_gain(executed: Gpu, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    x, by = rows(33, width), gain(width, wide=True)
    with plain_mlx(monkeypatch):
        expected = rms_norm(x.astype(mx.float32), by, EPS)
        mx.eval(expected)
    monkeypatch.setattr(mx.fast, "rms_norm", lambda *_: pytest.fail("plain operations took the norm"))
    assert error(rms_norm(x, by, EPS), exact(expected)) < 3e-3


def test_a_product_with_its_residual_is_rounded_once(executed: Gpu) -> None:
    matrix = packed((64, 128), "nvfp4", 4, 16)
    parts = mx.quantize(mx.array(matrix.values).astype(mx.bfloat16), group_size=16, bits=4, mode="nvfp4")
    made = Matrix(*parts, mode="nvfp4", bits=4, group_size=16)
    x, residual = rows(40, 128), rows(40, 64, 30.0)
    w = exact(mx.dequantize(*parts, group_size=16, bits=4, mode="nvfp4", dtype=mx.float32))
    expected = exact(residual) + exact(x) @ w.T
    assert error(made.plus(x, residual), expected) <= 1.1 * error(mx.array(expected).astype(mx.bfloat16), expected)


def test_queries_need_no_padding_and_results_no_copy(executed: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, count = Shape(2, 1, 64, 0.125), 40
    monkeypatch.setattr(plain_attention, "PLANS", ((1 << 31, 64),))
    monkeypatch.setattr(mx, "pad", lambda *_: pytest.fail("queries were padded by a copy"))
    buffers = [buffer(1, 256, 64) for _ in "kv"]
    y, _ = prompts.attend(
        shape,
        prompts.PLAIN,
        rows(count, shape.width),
        None,
        buffers,
        lengths=[count],
        positions=[70],
        bases=[0],
        query_norm=None,
        key_norm=None,
        memo={},
    )
    assert y.shape == (count, 128)
    mx.eval(y)


def test_prompts_are_left_to_the_graph_where_their_heads_have_another_form(executed: Gpu) -> None:
    shape, angles = Shape(4, 2, 128, 1.0), mx.zeros((1, 64, 2))
    buffers = [mx.zeros((1, 2, 256, 128), mx.bfloat16)] * 2
    norm, wide = (mx.ones((128,), mx.bfloat16), EPS), (mx.ones((128,)), EPS)

    def taken(shape: Shape = shape, angles: mx.array | None = angles, **other: Any) -> bool:
        given: dict[str, Any] = {"buffers": buffers, "norms": [norm, norm], "memo": {}, "dtype": mx.bfloat16} | other
        return prompts.takes(shape, prompts.PLAIN, angles=angles, **given)

    assert taken()
    assert taken(angles=None)
    assert taken(angles=mx.zeros((1, 16, 2)))
    assert not taken(angles=mx.zeros((1, 24, 2)))
    assert taken(angles=mx.zeros((1, 24, 2)), interleaved=True)
    assert not taken(replace(shape, head_dim=96))
    assert not taken(dtype=mx.float32)
    assert not taken(buffers=[b.astype(mx.float32) for b in buffers])
    assert not taken(norms=[norm, wide])
    assert not taken(memo={REPLAYED: True})


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
def test_gated_activations_of_joined_rows(
    executed: Gpu, monkeypatch: pytest.MonkeyPatch, activation: Activation
) -> None:
    x = rows(34, 2 * 72, 4.0)
    with plain_mlx(monkeypatch):
        expected = gated(activation, *mx.split(x.astype(mx.float32), 2, axis=-1))
        mx.eval(expected)
    assert error(gated_rows(activation, x), exact(expected)) < 3e-3


@pytest.mark.parametrize(("width", "wide"), [(1032, False), (64, True)])
def test_a_residual_sum_and_its_norm(executed: Gpu, monkeypatch: pytest.MonkeyPatch, width: int, wide: bool) -> None:
    x, branch, by = rows(33, width), rows(33, width), gain(width, wide=wide)
    with plain_mlx(monkeypatch):
        total, expected = add_rms_norm(x, branch, by, EPS)
        mx.eval(total, expected)
    ours, norm = add_rms_norm(x, branch, by, EPS)
    assert mx.array_equal(ours, total)
    assert error(norm, exact(expected)) < 3e-3


@pytest.mark.parametrize("silu", [True, False])
def test_normed_heads_and_their_gates(executed: Gpu, monkeypatch: pytest.MonkeyPatch, silu: bool) -> None:
    y, x, by = rows(33, 3 * 64).reshape(33, 3, 64), rows(33, 3 * 64 + 24, 3.0), gain(64, wide=True)
    with plain_mlx(monkeypatch):
        expected = gated_norm(*(a.astype(mx.float32) for a in (y, x)), 8, by, EPS, silu=silu)
        mx.eval(expected)
    assert error(gated_norm(y, x, 8, by, EPS, silu=silu), exact(expected)) < 3e-3
