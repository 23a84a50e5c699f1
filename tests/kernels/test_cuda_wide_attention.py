"""Attention of wide heads, and heads made ready for it, on an NVIDIA GPU, against float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from arriero.bench.gpu_models import random_model
from arriero.bench.gpu_shapes import CONFIGS
from arriero.kernels import device
from arriero.kernels.cuda import heads, wide_attention
from arriero.kernels.cuda.attention import Shape
from arriero.kernels.cuda.gpu import Gpu
from arriero.kernels.cuda.heads import Form
from arriero.model.contract import Batch, Span
from arriero.model.quantization import Quantization
from tests.helpers.bits import same
from tests.helpers.cuda import ON_GPU, SEED, error, exact, executed, rows
from tests.kernels.test_cuda_attention import EPS, Case, check, rounded

__all__ = ["executed"]


@dataclass
class Wide(Case):
    """Heads that come ready."""

    norms: bool = False
    turned: bool = False

    def run(self, gpu: Gpu) -> tuple[mx.array, list[mx.array]]:
        assert wide_attention.takes(self.shape, self.lengths)
        where = {"lengths": self.lengths, "positions": self.positions, "bases": self.bases}
        return wide_attention.attend(gpu, self.shape, self.qkv, self.buffers, **where, memo={})


@pytest.mark.parametrize(
    ("lengths", "positions", "bases"),
    [
        ([1, 1, 1], [0, 70, 300], [0, 0, 256]),
        pytest.param([1], [130], [0], marks=ON_GPU),
        pytest.param([3, 5], [62, 5], [0, 0], marks=ON_GPU),
    ],
)
def test_wide_heads_see_what_is_before_each(
    executed: Gpu, lengths: list[int], positions: list[int], bases: list[int]
) -> None:
    check(executed, Wide(Shape(8, 2, 256, 0.06), lengths, positions, bases))


def test_the_widest_heads(executed: Gpu) -> None:
    check(executed, Wide(Shape(8, 1, 512, 0.04), [2], [100], [0]))


@pytest.mark.parametrize(
    ("form", "turned", "wide"),
    [
        (Form(gated=True), 16, True),
        (Form(keys_are_values=True, normed_values=True), 64, False),
        pytest.param(Form(), 0, False, marks=ON_GPU),
    ],
)
def test_heads_are_normed_turned_and_gated(executed: Gpu, form: Form, turned: int, wide: bool) -> None:
    shape, count, dim = Shape(3, 2, 64, 1.0), 4, 64
    per, kinds = 2 if form.gated else 1, 1 if form.keys_are_values else 2
    x = rows(count, (per * 3 + kinds * 2) * dim)
    gains = [(1 + 0.2 * rows(1, dim)[0].astype(mx.float32)).astype(mx.float32 if wide else mx.bfloat16) for _ in "qk"]
    angles = SEED.uniform(0, 6.28, (count, turned // 2))
    table = np.stack([np.cos(angles), np.sin(angles)], -1).astype(np.float32)
    norms = [(gain, EPS) for gain in gains]
    assert heads.takes(shape, form, turned // 2, norms[0], norms[1])
    flat = mx.array(np.append(table.reshape(-1), 0).astype(np.float32))
    made = heads.prepare(shape, form, x, flat, turned // 2, norms[0], norms[1])

    def normed(part: np.ndarray, gain: np.ndarray | float) -> np.ndarray:
        return rounded(part / np.sqrt((part**2).mean(-1, keepdims=True) + EPS) * gain)

    def turn(part: np.ndarray) -> np.ndarray:
        half, rest = turned // 2, part[..., turned:]
        a, b = part[..., :half], part[..., half:turned]
        cos, sin = (table[:, None, :, i].astype(float) for i in range(2))
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)

    given = exact(x).reshape(count, -1, dim)
    q, gate = given[:, : per * 3 : per], given[:, 1 : per * 3 : 2]
    k, v = given[:, per * 3 : per * 3 + 2], given[:, -2:]
    v = normed(v, 1.0) if form.normed_values else v
    expected = np.concatenate([turn(normed(q, exact(gains[0]))), turn(normed(k, exact(gains[1]))), v], 1)
    assert error(made, expected.reshape(count, -1)) < 3e-3
    if form.gated:
        y = rows(count, 3 * dim)
        weighed = exact(y) / (1 + np.exp(-gate.reshape(count, -1)))
        assert error(heads.gate(shape, x, y), weighed) < 3e-3


def test_gemma_is_replayed_and_gives_what_plain_operations_give(executed: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "sliding_window_pattern": 2}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_global_key_value_heads": 1, "head_dim": 64}
    small |= {"global_head_dim": 256, "vocab_size": 64, "sliding_window": 64}
    mx.random.seed(5)
    model: Any = random_model(CONFIGS["Gemma-4-31B"] | small, Quantization("nvfp4", 4, 16))

    def steps(forward: Any) -> list[mx.array]:
        caches, made = model.new_caches(), []
        for position in range(3):
            made.append(forward(Batch(mx.array([5 + position], mx.int32), [Span(0, 1, position, caches)])).final)
            mx.eval(made[-1])
        return made

    plain, again = steps(model._by_layers), steps(model.forward)
    assert any(seen.run is not None for seen in model._replay._forms.values())
    monkeypatch.setattr(device, "cuda", lambda: None)
    for ours, replayed, graph in zip(plain, again, steps(model._by_layers), strict=True):
        assert same(ours, replayed)
        assert error(ours, exact(graph)) < 0.06  # its own distance from float32 is 0.036
