"""Prompts on an NVIDIA GPU: attention in shapes that come again, and forwards of their own beside decoding rows."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from arriero.kernels import attention as module
from arriero.kernels.attention import attention
from arriero.kernels.cuda.gpu import Gpu
from tests.helpers.cuda import error, exact, executed, rows

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
