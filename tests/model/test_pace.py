"""On an NVIDIA GPU the host is at most two groups of layers ahead within a forward of many tokens."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from arriero.bench.gpu_models import Quantization, random_model
from arriero.kernels import device
from arriero.kernels.cuda import attention as cuda
from arriero.kernels.cuda.product import FEW
from arriero.model.contract import Batch, Span
from arriero.model.layers import pace
from arriero.model.layers.pace import Pace
from tests.helpers.cuda import emulate
from tests.helpers.small_shapes import small


def waits(monkeypatch: pytest.MonkeyPatch, batch: Batch) -> list[list[int]]:
    """Which layers the host waits for, after each of six."""
    arrays = [mx.zeros((1,)) + index for index in range(6)]
    names = {id(array): index for index, array in enumerate(arrays)}
    waited: list[int] = []
    monkeypatch.setattr(mx, "eval", lambda array: waited.append(names[id(array)]))
    paced, found = Pace(batch, 6), []
    for index, array in enumerate(arrays):
        paced.passed(index, array)
        found.append(list(waited))
    return found


def batch(tokens: int, **memo: Any) -> Batch:
    return Batch(mx.zeros((tokens,), mx.int32), [], memo=memo)


def test_the_host_waits_for_the_group_before_the_latest_but_not_for_the_last_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "cuda", lambda: object())
    assert waits(monkeypatch, batch(FEW + 1)) == [[], [], [], [1], [1], [1]]


@pytest.mark.parametrize(
    ("on_gpu", "tokens", "memo"), [(False, 100, {}), (True, FEW, {}), (True, 100, {cuda.REPLAYED: True})]
)
def test_it_waits_for_nothing_elsewhere(
    monkeypatch: pytest.MonkeyPatch, on_gpu: bool, tokens: int, memo: dict[str, Any]
) -> None:
    monkeypatch.setattr(device, "cuda", lambda: object() if on_gpu else None)
    assert waits(monkeypatch, batch(tokens, **memo)) == [[]] * 6


def test_a_prompt_has_the_same_bits_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    model = random_model(small("Qwen3-8B", hidden_size=128, head_dim=64), Quantization("nvfp4", 4, 16))
    found = []
    for together in (pace.TOGETHER, 100):
        monkeypatch.setattr(pace, "TOGETHER", together)
        tokens = mx.arange(FEW + 2, dtype=mx.int32)
        final = model.forward(Batch(tokens, [Span(0, FEW + 2, 0, model.new_caches())])).final
        found.append(np.array(final.astype(mx.float32)))
    assert np.array_equal(*found)
