"""The parts of towers against numpy in double precision."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from arriero.image import ImagePatches
from arriero.model.architectures import load_model
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Features, vision_of
from arriero.model.layers.embedding import put_features
from arriero.model.vision import parts
from arriero.model.vision.parts import LayerNorm, gelu, mutual_attention, pixel_rows
from arriero.source import FolderSource
from tests.helpers.pictures import GOLDENS, Golden

pytestmark = pytest.mark.usefixtures("kernels")


def random(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1, shape).astype(np.float32)


def softmax_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
    q, k, v = (np.repeat(a.astype(np.float64), q.shape[1] // a.shape[1], axis=1) for a in (q, k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) * scale
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)


@pytest.mark.parametrize(("count", "heads", "kv_heads", "size"), [(1, 1, 1, 72), (300, 2, 2, 72), (77, 4, 2, 64)])
def test_every_patch_sees_every_other(count: int, heads: int, kv_heads: int, size: int) -> None:
    q, k, v = (
        random(count, heads, size, seed=1),
        random(count, kv_heads, size, seed=2),
        random(count, kv_heads, size, seed=3),
    )
    found = np.array(mutual_attention(mx.array(q), mx.array(k), mx.array(v), scale=size**-0.5))
    np.testing.assert_allclose(found, softmax_attention(q, k, v, size**-0.5), atol=2e-5)


@pytest.mark.parametrize(
    ("dtype", "size", "width", "blocks"),
    [
        (mx.float32, 72, 80, [100, 100, 100]),
        (mx.bfloat16, 72, 80, [300]),
        (mx.bfloat16, 64, 64, [300]),
        (mx.bfloat16, 130, 130, [100, 100, 100]),
    ],
)
def test_gpus_get_widths_with_a_fused_kernel_and_blocks_of_queries_elsewhere(
    monkeypatch: pytest.MonkeyPatch, dtype: mx.Dtype, size: int, width: int, blocks: list[int]
) -> None:
    q, k, v = (mx.array(random(300, 2, size, seed=seed)).astype(dtype) for seed in (4, 5, 6))
    expected = np.array(mutual_attention(q, k, v, scale=0.1).astype(mx.float32))
    calls: list[tuple[int, int]] = []
    attention = parts.attention

    def counted(q: mx.array, *rest: Any, **how: Any) -> mx.array:
        calls.append((q.shape[0], q.shape[-1]))
        return attention(q, *rest, **how)

    monkeypatch.setattr(parts, "on_cpu", lambda: False)
    monkeypatch.setattr(parts, "SCORE_BUDGET", 100 * 300 * 2)
    monkeypatch.setattr(parts, "attention", counted)
    found = mutual_attention(q, k, v, scale=0.1)
    assert found.shape == (300, 2, size)
    tolerance = 1e-6 if dtype == mx.float32 else 0.02
    np.testing.assert_allclose(np.array(found.astype(mx.float32)), expected, atol=tolerance)
    assert calls == [(block, width) for block in blocks]


def test_both_forms_of_gelu() -> None:
    x = np.linspace(-6, 6, 101, dtype=np.float32)
    exact = [0.5 * a * (1 + math.erf(a / math.sqrt(2))) for a in x.astype(float)]
    tanh = [0.5 * a * (1 + math.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3))) for a in x.astype(float)]
    np.testing.assert_allclose(np.array(gelu(mx.array(x), tanh=False)), exact, atol=2e-6)
    np.testing.assert_allclose(np.array(gelu(mx.array(x), tanh=True)), tanh, atol=2e-6)
    assert gelu(mx.array(x).astype(mx.bfloat16), tanh=True).dtype == mx.bfloat16


def test_a_norm_with_a_mean() -> None:
    x, gain, bias = random(5, 32, seed=7), random(32, seed=8), random(32, seed=9)
    found = LayerNorm(mx.array(gain), mx.array(bias), 1e-5)(mx.array(x))
    expected = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * gain + bias
    np.testing.assert_allclose(np.array(found), expected, atol=1e-5)


def test_pixels_become_numbers_by_channel_in_both_orders() -> None:
    raw = np.random.default_rng(1).integers(0, 256, (2, 3, 4), dtype=np.uint8)
    mean, deviation = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)

    def patches(values: np.ndarray) -> ImagePatches:
        data = np.ascontiguousarray(values).tobytes()
        return ImagePatches.of(rows=1, columns=2, tokens=1, pixels=data, mean=mean, deviation=deviation)

    expected = (raw / 255 - np.array(mean)[:, None]) / np.array(deviation)[:, None]
    first = np.array(pixel_rows(patches(raw), "channels first"))
    np.testing.assert_allclose(first, expected.reshape(2, -1), atol=1e-6)
    last = np.array(pixel_rows(patches(raw.swapaxes(1, 2)), "channels last"))
    np.testing.assert_allclose(last, expected.swapaxes(1, 2).reshape(2, -1), atol=1e-6)


@pytest.mark.parametrize("ranges", [[], [(0, 3)], [(4, 6)], [(0, 2), (2, 5)], [(1, 2), (5, 6)], [(0, 6)]])
def test_rows_of_images_take_the_places_of_tokens(ranges: list[tuple[int, int]]) -> None:
    x = mx.array(random(6, 8, seed=3)).astype(mx.bfloat16)
    expected = np.array(x.astype(mx.float32))
    features = []
    for low, high in ranges:
        rows = random(high - low, 8, seed=low + 9)
        features.append(Features(low, mx.array(rows)))
        expected[low:high] = np.array(mx.array(rows).astype(mx.bfloat16).astype(mx.float32))
    found = put_features(x, features)
    assert found.dtype == mx.bfloat16
    np.testing.assert_array_equal(np.array(found.astype(mx.float32)), expected)


def test_a_large_image_is_computed_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(Checkpoint.open(FolderSource(str(GOLDENS / "qwen3_5"))), mx.float32)
    vision, image = vision_of(model), Golden.load("qwen3_5", "first").images[0].patches
    assert vision is not None
    expected = np.array(vision.encode(image))
    settled: list[int] = []
    evaluate = mx.eval
    monkeypatch.setattr(parts.mx, "eval", lambda x: settled.append(x.shape[0]) or evaluate(x))
    vision.encode(image)
    assert settled == []
    monkeypatch.setattr(parts, "LARGE", 59)
    found = vision.encode(image)
    assert settled == [60, 60]
    monkeypatch.undo()
    np.testing.assert_array_equal(np.array(found), expected)
