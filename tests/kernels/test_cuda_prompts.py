"""Attention of prompts on an NVIDIA GPU: shapes that come again, and rows that decode beside them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from arriero.kernels import attention as module
from arriero.kernels.attention import attention
from arriero.kernels.attention_part import AttentionPart
from arriero.kernels.cuda.gpu import Gpu
from arriero.kernels.matrix import Matrix
from tests.helpers.cuda import Packed, error, exact, executed, packed, rows

__all__ = ["executed"]

EPS = 1e-6


def shapes_of(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Queries and keys of each call of MLX's attention from now on."""
    seen: list[tuple[int, int]] = []
    real = mx.fast.scaled_dot_product_attention

    def noted(q: mx.array, k: mx.array, v: mx.array, **how: Any) -> mx.array:
        seen.append((q.shape[2], k.shape[2]))
        return real(q, k, v, **how)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", noted)
    return seen


@pytest.mark.parametrize(
    ("length", "position", "held", "shape"),
    [
        (100, 0, 256, (256, 256)),
        (100, 700, 1024, (512, 1024)),
        (512, 512, 1024, (512, 1024)),
        (33, 250, 512, (512, 512)),
        (40, 270, 310, (54, 310)),  # there is nothing behind the last key to go on with
    ],
)
@pytest.mark.parametrize("window", [None, 300])
def test_queries_and_keys_come_in_few_shapes(
    executed: Gpu,
    monkeypatch: pytest.MonkeyPatch,
    length: int,
    position: int,
    held: int,
    shape: tuple[int, int],
    window: int | None,
) -> None:
    q = rows(length, 4 * 64).reshape(length, 4, 64)
    k, v = (rows(2 * held, 64).reshape(1, 2, held, 64) for _ in range(2))
    how: dict[str, Any] = {"scale": 0.125, "lengths": [length], "positions": [position], "window": window}
    # On a GPU without windows a call has all queries.
    monkeypatch.setattr(module, "QUERY_BLOCK", 1 << 20)
    seen = shapes_of(monkeypatch)
    ours = attention(q, [k], [v], **how)
    if window is None:
        assert seen == [shape]
    end = position + length
    with monkeypatch.context() as patch:
        patch.setattr(module, "planned", lambda q: False)
        plain = attention(q, [k[:, :, :end]], [v[:, :, :end]], **how)
    assert error(ours, exact(plain)) < 5e-3


def matrix_of(matrix: Packed) -> Matrix:
    m = matrix.operand
    return Matrix(m.w, m.scales, m.biases, m.format.group, m.format.bits, "nvfp4", matrix.global_scale)


def test_rows_that_decode_beside_a_prompt_don_t_wait_for_plain_operations(
    executed: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    qkv, out = (packed(shape, "nvfp4", 4, 16) for shape in [(512, 256), (256, 256)])
    gain = rows(2, 64) * 0.1 + 1
    part = AttentionPart(
        [matrix_of(qkv)],
        matrix_of(out),
        4,
        2,
        64,
        0.125,
        before=(mx.ones((256,), mx.bfloat16), EPS),
        query_norm=(gain[0], EPS),
        key_norm=(gain[1], EPS),
    )
    lengths, positions, bases = [1, 2, 40], [70, 300, 20], [0, 256, 0]
    total = sum(lengths)
    turns = np.random.default_rng(1).uniform(0, 6, (total, 32))
    angles = mx.array(np.stack([np.cos(turns), np.sin(turns)], -1).astype(np.float32))
    x = rows(total, 256)
    how: dict[str, Any] = {"lengths": lengths, "positions": positions, "bases": bases}

    def buffers() -> list[mx.array]:
        made = [
            mx.random.normal((1, 2, 256, 64), key=mx.random.key(i)).astype(mx.bfloat16) for i in range(2 * len(lengths))
        ]
        mx.eval(made)
        return made

    seen = shapes_of(monkeypatch)
    ours, filled = part(x, angles, buffers(), **how, memo={})
    assert len(seen) == 1
    plain, kept = part.graph(x, angles, buffers(), **how, memo={})
    # Both round to bfloat16 at other places, six times on the way.
    assert error(ours, exact(plain)) < 2e-2
    for a, b in zip(filled, kept, strict=True):
        assert error(a, exact(b)) < 5e-3
