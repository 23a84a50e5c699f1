"""Latent attention of new tokens over rows' own caches on an NVIDIA GPU, against float64."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from arriero.kernels.cuda import gathering, latent
from arriero.kernels.cuda.gpu import Gpu
from tests.helpers.cuda import ON_GPU, SEED, error, exact, executed, rows
from tests.kernels.test_cuda_attention import EPS, rounded

__all__ = ["executed"]

TOLERANCE = 5e-3


def turned(x: np.ndarray, angles: np.ndarray, interleaved: bool) -> np.ndarray:
    """Heads `[T, n, R]` by the angles `[T, R / 2]`."""
    half = x.shape[-1] // 2
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = first * cos - second * sin, second * cos + first * sin
    return rounded(np.stack([a, b], -1).reshape(x.shape) if interleaved else np.concatenate([a, b], -1))


def check(
    gpu: Gpu,
    shape: latent.Shape,
    lengths: list[int],
    positions: list[int],
    *,
    together: bool = True,
    wide: bool = False,
    size: float = 1.0,
) -> None:
    s, new = shape, sum(lengths)
    absorbed = mx.contiguous(rows(s.heads * new, s.rank, size).reshape(s.heads, new, s.rank))
    queries, fresh = rows(new, s.heads * (s.nope + s.rotated)), rows(new, s.width, 3.0)
    gain = (1 + 0.2 * rows(1, s.rank)[0].astype(mx.float32)).astype(mx.float32 if wide else mx.bfloat16)
    angles = SEED.uniform(0, 6.28, (new, s.rotated // 2))
    table = mx.array(np.stack([np.cos(angles), np.sin(angles)], -1).astype(np.float32))
    buffers = [
        mx.contiguous(rows(-(-(at + count) // 64) * 64, s.width)[None, None])
        for at, count in zip(positions, lengths, strict=True)
    ]
    behind = queries.shape[1] if together else 0
    if together:
        joined = mx.concatenate([queries, fresh], axis=1)
    mx.eval(buffers)
    before = [exact(buffer)[0, 0] for buffer in buffers]
    assert latent.takes(gpu, s, lengths, table, (gain, EPS))
    y, held = latent.attend(
        gpu,
        s,
        absorbed,
        joined if together else queries,
        joined if together else fresh,
        table,
        (gain, EPS),
        buffers,
        begin=behind,
        lengths=lengths,
        positions=positions,
        bases=[0] * len(lengths),
        memo={},
    )
    given = exact(fresh)
    content = given[:, : s.rank]
    content = rounded(content / np.sqrt((content**2).mean(-1, keepdims=True) + EPS) * exact(gain))
    keys = np.concatenate([content, turned(given[:, None, s.rank :], angles, s.interleaved)[:, 0]], -1)
    by_head = exact(queries).reshape(new, s.heads, -1)[..., s.nope :]
    q = np.concatenate([exact(absorbed).swapaxes(0, 1), turned(by_head, angles, s.interleaved)], -1)
    want, first = np.zeros((new, s.heads, s.rank)), 0
    for row, (length, place) in enumerate(zip(lengths, positions, strict=True)):
        all_keys = before[row].copy()
        all_keys[place : place + length] = keys[first : first + length]
        for i in range(length):
            seen = all_keys[: place + i + 1]
            scores = q[first + i] @ seen.T * s.scale
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            want[first + i] = weights / weights.sum(-1, keepdims=True) @ seen[:, : s.rank]
        assert error(held[row], all_keys[None, None]) < 1e-3
        assert np.array_equal(exact(held[row])[0, 0, :place], before[row][:place])
        first += length
    assert error(y, want) < TOLERANCE


SMALL = latent.Shape(5, 256, 32, 16, 0.06, interleaved=False)


@pytest.mark.parametrize(
    ("lengths", "positions"),
    [
        ([1, 1, 1], [0, 70, 130]),
        pytest.param([1], [500], marks=ON_GPU),
        pytest.param([9, 2], [61, 3], marks=ON_GPU),
    ],
)
def test_heads_share_what_is_before_each(executed: Gpu, lengths: list[int], positions: list[int]) -> None:
    check(executed, SMALL, lengths, positions)


def test_several_tokens_of_a_row_turned_by_neighbours(executed: Gpu) -> None:
    shape = latent.Shape(5, 256, 64, 32, 0.06, interleaved=True)
    check(executed, shape, [4], [62], together=False, wide=True)


@ON_GPU
@pytest.mark.parametrize("heads", [16, 20, 128])
@pytest.mark.parametrize(
    ("lengths", "positions"),
    [
        ([1], [3000]),
        ([1] * 8, [300 * i for i in range(8)]),
        ([1] * 11, [77 * i for i in range(11)]),
        ([8, 1], [900, 64]),
    ],
)
def test_published_shapes(executed: Gpu, heads: int, lengths: list[int], positions: list[int]) -> None:
    check(executed, latent.Shape(heads, 512, 64, 128, 192**-0.5, interleaved=True), lengths, positions)


@pytest.mark.parametrize(("multiprocessors", "splits"), [(20, 16), pytest.param(132, 64, marks=ON_GPU)])
def test_keys_that_many_blocks_share(
    executed: Gpu, monkeypatch: pytest.MonkeyPatch, multiprocessors: int, splits: int
) -> None:
    many = replace(executed, multiprocessors=multiprocessors)
    assert latent.splits(many, SMALL, 1) == splits
    check(many, SMALL, [1], [700])
    monkeypatch.setenv(gathering.CHAIN, "0")
    assert latent.splits(many, SMALL, 1) == 1


def test_where_shared_memory_is_scarce(executed: Gpu) -> None:
    small = replace(executed, shared_memory=64 << 10)
    assert latent.buffers_for(executed, SMALL) == 2
    assert latent.buffers_for(small, SMALL) == 1
    check(small, SMALL, [2], [190])


def test_large_scores_don_t_overflow(executed: Gpu) -> None:
    check(executed, SMALL, [1], [100], size=40.0)
