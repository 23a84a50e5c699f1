"""Layers in a row as one operation against their halves called one by one, bit for bit."""

import arriero_cpu as cpu
import mlx.core as mx
import numpy as np
import pytest
from helpers import DTYPES, normal, same

HIDDEN, HEADS, KV_HEADS, DIM, INNER, DEPTH = 64, 4, 2, 16, 96, 3


def layers(rng, dtype):
    def matrix(n, k):
        how = {"group_size": 32, "bits": 4}
        return cpu.matrix(packed=cpu.pack(*mx.quantize(normal(rng, n, k), **how), **how))

    def gain(n):
        return (normal(rng, n, dtype=dtype), 1e-5)

    def layer(window):
        attention = cpu.attention_part(
            before=gain(HIDDEN),
            qkv=[matrix((HEADS + 2 * KV_HEADS) * DIM, HIDDEN)],
            query_norm=gain(DIM) if window else None,
            out=matrix(HIDDEN, HEADS * DIM),
            after=gain(HIDDEN) if window else None,
            heads=HEADS,
            kv_heads=KV_HEADS,
            head_dim=DIM,
            scale=0.25,
            window=window,
        )
        gate_up, down = [matrix(2 * INNER, HIDDEN)], matrix(HIDDEN, INNER)
        return attention, cpu.gated_part(before=gain(HIDDEN), gate_up=gate_up, down=down)

    return [layer(window) for window in (None, 20, None)]


def settle(parts, dtype):
    """The halves look once whether their weights are computed."""
    x, buffers = mx.zeros((1, HIDDEN), dtype), [mx.zeros((1, KV_HEADS, 256, DIM), dtype) for _ in range(2)]
    for attention, gated in parts:
        mx.eval(gated(x, attention(x, None, buffers, [1], [0], [0])[0]))


class Rows:
    """What some rows hold: a pair of buffers for each of them in each layer."""

    def __init__(self, rng, rows, dtype):
        self.held = [[normal(rng, 1, KV_HEADS, 512, DIM, dtype=dtype) for _ in range(2 * rows)] for _ in range(DEPTH)]

    def copy(self):
        other = Rows.__new__(Rows)
        other.held = [[buffer + 0 for buffer in layer] for layer in self.held]
        mx.eval(other.held)
        return other

    def by_halves(self, parts, x, turns, lengths, positions, bases):
        for i, (attention, gated) in enumerate(parts):
            branch, *self.held[i] = attention(x, turns[i], self.held[i], lengths, positions, bases)
            x = gated(x, branch)
        return x

    def at_once(self, stack, x, turns, lengths, positions, bases, after=()):
        buffers = [buffer for layer in self.held for buffer in layer]
        return stack(x, turns, buffers, lengths, positions, list(bases) * DEPTH, list(after))


def angles(lengths, positions):
    at = np.concatenate([np.arange(p, p + n) for n, p in zip(lengths, positions, strict=True)])
    return cpu.rope_table(mx.array(at), mx.array(np.linspace(0.01, 1, 8).astype(np.float32)))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    ("lengths", "positions"), [([1], [0]), ([1, 1, 1], [300, 0, 17]), ([5, 0, 40], [0, 255, 3]), ([300], [200])]
)
def test_a_stack_gives_the_bits_of_its_halves(rng, dtype, lengths, positions):
    parts = layers(rng, dtype)
    stack = cpu.stack(parts)
    settle(parts, dtype)
    assert stack.ready
    bases = [p // 256 * 256 for p in positions]
    x = normal(rng, sum(lengths), HIDDEN, dtype=dtype)
    turns = [angles(lengths, positions)] * 2 + [None]
    rows = Rows(rng, len(lengths), dtype)
    others = rows.copy()
    got = others.at_once(stack, x, turns, lengths, positions, bases)
    want = rows.by_halves(parts, x, turns, lengths, positions, bases)
    assert got.dtype == dtype
    assert same(got, want)
    for mine, theirs in zip(others.held, rows.held, strict=True):
        assert all(same(a, b) for a, b in zip(mine, theirs, strict=True))


def test_calls_behind_each_other_see_what_was_written_before_anything_is_computed(rng):
    dtype = mx.float32
    parts = layers(rng, dtype)
    stack = cpu.stack(parts)
    settle(parts, dtype)
    rows = Rows(rng, 2, dtype)
    others = rows.copy()
    tokens = [normal(rng, 2, HIDDEN, dtype=dtype) for _ in range(4)]
    want, got, after = [], [], []
    for step, x in enumerate(tokens):
        lengths, positions, bases = [1, 1], [step, 40 + step], [0, 0]
        turns = [angles(lengths, positions)] * DEPTH
        want.append(rows.by_halves(parts, x, turns, lengths, positions, bases))
        got.append(others.at_once(stack, x, turns, lengths, positions, bases, after))
        after = got[-1:]
    assert same(got[-1], want[-1])
    assert all(same(a, b) for a, b in zip(got, want, strict=True))


def test_buffers_that_are_not_computed_yet_are_waited_for(rng):
    dtype = mx.bfloat16
    parts = layers(rng, dtype)
    stack = cpu.stack(parts)
    settle(parts, dtype)
    rows = Rows(rng, 1, dtype)
    lazy = rows.copy()
    lazy.held = [[mx.concatenate([b[:, :, :100], b[:, :, 100:]], axis=2) for b in layer] for layer in lazy.held]
    x, turns = normal(rng, 2, HIDDEN, dtype=dtype), [angles([2], [100])] * DEPTH
    got = lazy.at_once(stack, x, turns, [2], [100], [0])
    assert same(got, rows.by_halves(parts, x, turns, [2], [100], [0]))


def test_a_stack_outlives_the_arrays_that_it_was_called_with(rng):
    dtype = mx.float32
    parts = layers(rng, dtype)
    settle(parts, dtype)
    rows = Rows(rng, 1, dtype)
    x, turns = normal(rng, 1, HIDDEN, dtype=dtype), [angles([1], [7])] * DEPTH
    want = rows.copy().by_halves(parts, x, turns, [1], [7], [0])
    got = rows.at_once(cpu.stack(parts), x, turns, [1], [7], [0])
    del rows, turns, parts
    mx.clear_cache()
    assert same(got, want)


def test_a_stack_refuses_what_does_not_fit(rng):
    parts = layers(rng, mx.float32)
    with pytest.raises(ValueError, match="no layers"):
        cpu.stack([])
    settle(parts, mx.float32)
    stack = cpu.stack(parts)
    rows = Rows(rng, 1, mx.float32)
    buffers = [buffer for layer in rows.held for buffer in layer]
    x = normal(rng, 1, HIDDEN)
    with pytest.raises(ValueError, match="for each layer"):
        stack(x, [None], buffers, [1], [0], [0] * DEPTH, [])
    with pytest.raises(ValueError, match="for each layer"):
        stack(x, [None] * DEPTH, buffers[:-1], [1], [0], [0] * DEPTH, [])
    with pytest.raises(ValueError, match="do not fit a buffer"):
        stack(x, [None] * DEPTH, buffers, [1], [512], [0] * DEPTH, [])
    assert stack(x[:0], [None] * DEPTH, buffers, [0], [0], [0] * DEPTH, []).shape == (0, HIDDEN)


def test_weights_that_are_not_computed_yet_are_said_to_be_missing(rng):
    lazy = mx.random.normal((HIDDEN, HIDDEN))
    w = cpu.matrix(lazy)
    attention = cpu.attention_part(
        before=None, qkv=[cpu.matrix(mx.concatenate([lazy] * 3))], out=w, heads=4, kv_heads=4, head_dim=16, scale=1.0
    )
    gated = cpu.gated_part(before=(mx.ones(HIDDEN), 1e-5), gate_up=[w, w], down=w)
    stack = cpu.stack([(attention, gated)])
    assert not stack.ready
    with pytest.raises(ValueError, match="not computed yet"):
        stack(mx.zeros((1, HIDDEN)), [None], [mx.zeros((1, 4, 256, 16))] * 2, [1], [0], [0], [])
