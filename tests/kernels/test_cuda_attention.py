"""Attention of new tokens over rows' own caches on an NVIDIA GPU, against float64."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest

from arriero.kernels.attention_part import AttentionPart
from arriero.kernels.cuda import attention as cuda
from arriero.kernels.cuda.gpu import Gpu
from arriero.kernels.gated_part import GatedPart
from arriero.kernels.matrix import Matrix
from tests.helpers.cuda import SEED, Packed, error, exact, gpu, packed, rows

__all__ = ["gpu"]

TOLERANCE = 5e-3
EPS = 1e-6


def rounded(x: np.ndarray) -> np.ndarray:
    """To bfloat16."""
    return exact(mx.array(x.astype(np.float32)).astype(mx.bfloat16))


@dataclass
class Case:
    """Rows with histories, and what attention over them is."""

    shape: cuda.Shape
    lengths: list[int]
    positions: list[int]
    bases: list[int]
    norms: bool = True
    wide: bool = False
    turned: bool = True
    size: float = 1.0
    sunk: bool = False

    def __post_init__(self) -> None:
        s, new = self.shape, sum(self.lengths)
        self.qkv = rows(new, s.width, self.size)
        gain = 1 + 0.2 * rows(2, s.head_dim).astype(mx.float32)
        self.gains = gain if self.wide else gain.astype(mx.bfloat16)
        self.sinks = rows(1, s.heads, 2.0)[0] if self.sunk else None
        angles = SEED.uniform(0, 6.28, (new, s.head_dim // 2))
        self.angles = np.stack([np.cos(angles), np.sin(angles)], -1).astype(np.float32)
        self.buffers = []
        for length, position, base in zip(self.lengths, self.positions, self.bases, strict=True):
            capacity = -(-(position - base + length) // 64) * 64
            for _ in range(2):
                held = mx.concatenate([rows(capacity, s.head_dim, self.size)[None] for _ in range(s.kv_heads)])
                self.buffers.append(mx.contiguous(held[None]))
        mx.eval(self.buffers, self.qkv, self.gains)
        self.before = [exact(buffer)[0] for buffer in self.buffers]

    @property
    def pairs(self) -> list[tuple[mx.array, float] | None]:
        return [(self.gains[i], EPS) if self.norms else None for i in range(2)]

    def run(self, gpu: Gpu) -> tuple[mx.array, list[mx.array]]:
        angles = mx.array(self.angles) if self.turned else None
        query_norm, key_norm = self.pairs
        assert cuda.takes(self.shape, self.lengths, self.buffers, angles, [query_norm, key_norm])
        return cuda.attend(
            gpu,
            self.shape,
            self.qkv,
            angles,
            self.buffers,
            lengths=self.lengths,
            positions=self.positions,
            bases=self.bases,
            query_norm=query_norm,
            key_norm=key_norm,
            memo={},
            sinks=self.sinks,
        )

    def heads(self, which: slice, gain: np.ndarray) -> np.ndarray:
        """Heads of the new tokens, normed and turned, rounded where the graph rounds: `[T, heads, D]`."""
        d = self.shape.head_dim
        x = exact(self.qkv)[:, which].reshape(len(self.qkv), -1, d)
        if self.norms:
            x = rounded(x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * gain)
        if self.turned:
            cos, sin = self.angles[:, None, :, 0].astype(float), self.angles[:, None, :, 1].astype(float)
            a, b = x[..., : d // 2], x[..., d // 2 :]
            x = rounded(np.concatenate([a * cos - b * sin, b * cos + a * sin], -1))
        return x

    def expected(self) -> tuple[np.ndarray, list[np.ndarray]]:
        """Results `[T, heads · D]`, and each buffer with the new tokens in it."""
        s, gains = self.shape, exact(self.gains)
        edge, size = s.heads * s.head_dim, s.kv_heads * s.head_dim
        q = self.heads(slice(0, edge), gains[0])
        k = self.heads(slice(edge, edge + size), gains[1])
        v = exact(self.qkv)[:, edge + size :].reshape(len(self.qkv), s.kv_heads, s.head_dim)
        filled = [buffer.copy() for buffer in self.before]
        out = np.zeros((len(self.qkv), s.heads, s.head_dim))
        first = 0
        for row, (length, position, base) in enumerate(zip(self.lengths, self.positions, self.bases, strict=True)):
            keys, values = filled[2 * row], filled[2 * row + 1]
            place = position - base
            keys[:, place : place + length] = k[first : first + length].swapaxes(0, 1)
            values[:, place : place + length] = v[first : first + length].swapaxes(0, 1)
            for i in range(length):
                end = place + i + 1
                start = 0 if s.window is None else max(0, end - s.window)
                for head in range(s.heads):
                    of = head // s.per_head
                    scores = keys[of, start:end] @ q[first + i, head] * s.scale
                    if s.softcap is not None:
                        scores = s.softcap * np.tanh(scores / s.softcap)
                    if self.sinks is not None:
                        scores = np.append(scores, exact(self.sinks)[head])
                    weights = np.exp(scores - scores.max())
                    out[first + i, head] = weights[: end - start] / weights.sum() @ values[of, start:end]
            first += length
        return out.reshape(len(self.qkv), -1), filled


def check(gpu: Gpu, case: Case) -> None:
    expected, buffers = case.expected()
    y, filled = case.run(gpu)
    assert error(y, expected) < TOLERANCE
    for ours, theirs in zip(filled, buffers, strict=True):
        # The place of a rounding to bfloat16 may differ by its last bit.
        assert error(ours, theirs[None]) < 1e-3
    untouched = [position - base for position, base in zip(case.positions, case.bases, strict=True)]
    for ours, before, place in zip(filled, case.before, np.repeat(untouched, 2), strict=True):
        assert np.array_equal(exact(ours)[0, :, :place], before[:, :place])


@pytest.mark.parametrize("position", [0, 1, 63, 64, 700, 3001])
def test_one_token_sees_all_before_it(gpu: Gpu, position: int) -> None:
    check(gpu, Case(cuda.Shape(32, 8, 128, 128**-0.5), [1], [position], [0]))


@pytest.mark.parametrize("length", [2, 8, 19])
def test_several_tokens_see_what_is_before_each(gpu: Gpu, length: int) -> None:
    check(gpu, Case(cuda.Shape(32, 8, 128, 128**-0.5), [length], [500], [0]))


@pytest.mark.parametrize("rows", [2, 8, 11])
def test_rows_have_their_own_caches(gpu: Gpu, rows: int) -> None:
    positions = [137 * i % 900 for i in range(rows)]
    check(gpu, Case(cuda.Shape(16, 4, 128, 0.1), [1] * rows, positions, [0] * rows))


def test_rows_bring_different_numbers_of_tokens(gpu: Gpu) -> None:
    lengths = [5, 1, 8, 2, 1, 9, 1, 1, 3, 1]
    check(gpu, Case(cuda.Shape(16, 4, 128, 0.1), lengths, [90 * i for i in range(10)], [0] * 10))


@pytest.mark.parametrize("length", [1, 6])
def test_a_window_hides_older_keys(gpu: Gpu, length: int) -> None:
    shape = cuda.Shape(16, 2, 128, 0.09, window=200)
    check(gpu, Case(shape, [length, length], [1000, 150], [512, 0]))


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 64), (16, 2, 256), (8, 8, 256), (28, 4, 128)])
@pytest.mark.parametrize("length", [1, 3])
def test_heads_of_other_widths_and_numbers(gpu: Gpu, heads: int, kv_heads: int, dim: int, length: int) -> None:
    check(gpu, Case(cuda.Shape(heads, kv_heads, dim, dim**-0.5), [length], [333], [0]))


def test_scores_are_capped(gpu: Gpu) -> None:
    check(gpu, Case(cuda.Shape(16, 4, 128, 0.5, softcap=20.0), [1], [300], [0], size=2.0))


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize(("lengths", "positions"), [([1], [0]), ([1] * 8, [170 * i for i in range(8)]), ([8], [500])])
def test_a_head_may_look_at_nothing(gpu: Gpu, window: int | None, lengths: list[int], positions: list[int]) -> None:
    shape = cuda.Shape(64, 8, 64, 0.125, window=window)
    check(gpu, Case(shape, lengths, positions, [0] * len(lengths), norms=False, sunk=True))


def test_a_sink_may_outweigh_all_keys(gpu: Gpu) -> None:
    case = Case(cuda.Shape(16, 4, 64, 0.125), [1], [300], [0], norms=False, sunk=True)
    # exp(20) overflows nothing, and leaves a fraction of the sums.
    case.sinks = mx.full((16,), 20.0, mx.bfloat16)
    check(gpu, case)


def test_heads_without_norms_and_turns(gpu: Gpu) -> None:
    check(gpu, Case(cuda.Shape(16, 4, 64, 0.125), [4], [300], [0], norms=False, turned=False))


def test_gains_in_float32(gpu: Gpu) -> None:
    check(gpu, Case(cuda.Shape(16, 4, 128, 0.1), [2], [77], [0], wide=True))


def test_large_scores_don_t_overflow(gpu: Gpu) -> None:
    check(gpu, Case(cuda.Shape(16, 4, 128, 1.0), [1], [900], [0], norms=False, size=6.0))


def matrix_of(matrix: Packed) -> Matrix:
    m = matrix.operand
    return Matrix(m.w, m.scales, m.biases, m.format.group, m.format.bits, "nvfp4", matrix.global_scale)


def test_the_attention_half_of_a_layer_is_the_graphs(gpu: Gpu) -> None:
    scale = mx.array(0.5)
    qkv, out = (packed(shape, "nvfp4", 4, 16, global_scale=scale) for shape in [(1024, 1024), (1024, 512)])
    ones = mx.ones((1024,), mx.bfloat16)
    gain = rows(2, 128) * 0.1 + 1
    part = AttentionPart(
        [matrix_of(qkv)],
        matrix_of(out),
        4,
        2,
        128,
        128**-0.5,
        before=(ones, EPS),
        query_norm=(gain[0], EPS),
        key_norm=(gain[1], EPS),
    )
    x = rows(3, 1024)
    angles = mx.array(np.stack([np.cos(np.ones((3, 64))), np.sin(np.ones((3, 64)))], -1).astype(np.float32))
    lengths, positions, bases = [1, 2], [300, 20], [0, 0]

    def buffers() -> list[mx.array]:
        key = mx.random.key(1)
        made = [mx.random.normal((1, 2, 320, 128), key=key).astype(mx.bfloat16) for _ in range(4)]
        mx.eval(made)
        return made

    how = {"lengths": lengths, "positions": positions, "bases": bases}
    ours, filled = part(x, angles, buffers(), **how, memo={})
    plain, kept = part.graph(x, angles, buffers(), **how, memo={})
    # Both round to bfloat16 at other places, six times on the way.
    assert error(ours, exact(plain)) < 2e-2
    for a, b in zip(filled, kept, strict=True):
        assert error(a, exact(b)) < TOLERANCE


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("after", [True, False])
def test_the_feed_forward_half_of_a_layer_is_the_graphs(gpu: Gpu, joined: bool, after: bool) -> None:
    gate_up = packed((2048, 512), "nvfp4", 4, 16)
    down = packed((512, 1024), "nvfp4", 4, 16)
    whole = matrix_of(gate_up)
    assert whole.w is not None
    assert whole.scales is not None
    halves = [
        Matrix(whole.w[part], whole.scales[part], None, 16, 4, "nvfp4") for part in (slice(0, 1024), slice(1024, None))
    ]
    gain = rows(1, 512)[0] * 0.1 + 1
    part = GatedPart(
        (gain, EPS), [whole] if joined else halves, matrix_of(down), "silu", (gain, EPS) if after else None
    )
    x, branch = rows(5, 512), rows(5, 512)
    assert error(part(x, branch), exact(part.graph(x, branch))) < 1e-2


def test_what_is_read_of_a_buffer_has_the_new_tokens(gpu: Gpu) -> None:
    case = Case(cuda.Shape(16, 4, 128, 0.1), [1], [300], [0])
    _, buffers = case.expected()
    _, filled = case.run(gpu)
    # A copy is asked for before the attention was computed.
    copy = filled[0][:, :, 290:301] + 0
    assert error(copy, buffers[0][None, :, 290:301]) < 1e-3
