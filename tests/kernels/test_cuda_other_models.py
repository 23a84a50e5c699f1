"""Whole models with sinks or latents on an NVIDIA GPU: replayed, they give what plain operations give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from arriero.kernels import device
from arriero.kernels.cuda.gpu import Gpu
from arriero.kernels.cuda.source import Kernel
from arriero.model.contract import Batch, Span
from tests.helpers import small_models
from tests.helpers.bits import same
from tests.helpers.cuda import error, exact, executed

__all__ = ["executed"]

MODELS: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "gpt-oss": (small_models.gpt_oss, {"dense", "attention", "sparse"}),
    "latent": (small_models.latent, {"dense", "latent", "sparse"}),
}
"""And what of our kernels a step of theirs launches."""


@pytest.mark.parametrize("name", list(MODELS))
def test_replayed_steps_give_what_plain_operations_give(
    executed: Gpu, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    mx.random.seed(5)
    make, kernels = MODELS[name]
    model = make()

    def steps(forward: Any) -> list[mx.array]:
        caches, made = [model.new_caches() for _ in range(2)], []
        spans = [Span(0, 3, 0, caches[0]), Span(3, 1, 0, caches[1])]
        made.append(forward(Batch(mx.array([5, 6, 7, 8], mx.int32), spans)).final)
        for step in range(3):
            spans = [Span(0, 1, 3 + step, caches[0]), Span(1, 1, 1 + step, caches[1])]
            made.append(forward(Batch(mx.array([9 + step, 20 + step], mx.int32), spans)).final)
            mx.eval(made[-1])
        return made

    launched: set[str] = set()
    called = Kernel.__call__

    def noted(kernel: Kernel, *args: Any, **how: Any) -> list[mx.array]:
        launched.add(kernel.name)
        return called(kernel, *args, **how)

    with monkeypatch.context() as patch:
        patch.setattr(Kernel, "__call__", noted)
        plain = steps(model._by_layers)
    assert kernels <= launched
    again = steps(model.forward)
    assert any(seen.run is not None for seen in model._replay._forms.values())
    monkeypatch.setattr(device, "cuda", lambda: None)
    for ours, replayed, graph in zip(plain, again, steps(model._by_layers), strict=True):
        assert same(ours, replayed)
        assert error(ours, exact(graph)) < 0.03
