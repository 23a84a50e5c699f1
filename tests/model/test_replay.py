"""Decode steps that are recorded on an NVIDIA GPU: what is known of one size of buffers is known of the next."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from arriero.bench.gpu_models import Quantization, random_model
from arriero.model.contract import Batch, Hidden, Span
from arriero.model.layers import replay as module
from arriero.runner.caches import linear
from tests.helpers.cuda import emulate
from tests.helpers.small_shapes import small

BEFORE = 62
"""Positions before the steps, whose buffers are full two steps later."""


def test_a_cache_that_grows_has_no_step_built_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    monkeypatch.setattr(linear, "growth", lambda: (64, 0))
    model = random_model(
        small("Qwen3-8B", hidden_size=128, head_dim=64, num_hidden_layers=1), Quantization("nvfp4", 4, 16)
    )
    replay = model._replay  # type: ignore[attr-defined]
    built: list[int] = []
    by_layers = replay._first

    def first(form: object, batch: Batch) -> Hidden:
        built.append(batch.spans[0].position)
        made: Hidden = by_layers(form, batch)
        return made

    monkeypatch.setattr(replay, "_first", first)
    asked: list[int] = []
    held = module._held
    monkeypatch.setattr(
        module, "_held", lambda of_slot, lengths: (asked.append(of_slot[0].offset), held(of_slot, lengths))[1]
    )

    def written() -> list[np.ndarray]:
        caches, steps = model.new_caches(), []
        prompt = mx.arange(BEFORE, dtype=mx.int32)
        model.forward(Batch(prompt, [Span(0, BEFORE, 0, caches)]))
        for position in range(BEFORE, BEFORE + 5):
            final = model.forward(Batch(mx.array([position], mx.int32), [Span(0, 1, position, caches)])).final
            steps.append(np.array(final.astype(mx.float32)))
        return steps

    replayed = written()
    assert built == [BEFORE]
    # The last two steps are the one before them once more, and ask for nothing else.
    assert set(asked) == {BEFORE, BEFORE + 1, BEFORE + 2}
    assert len(replay._forms) == 2
    replay._refused = True
    for ours, plain in zip(replayed, written(), strict=True):
        assert np.array_equal(ours, plain)


def test_steps_of_several_tokens_find_their_places_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    model = random_model(
        small("Qwen3-8B", hidden_size=128, head_dim=64, num_hidden_layers=1), Quantization("nvfp4", 4, 16)
    )
    replay = model._replay  # type: ignore[attr-defined]

    def written() -> list[np.ndarray]:
        caches, steps, position = model.new_caches(), [], 0
        # As drafts are kept: all of them, some, none.
        for kept in (3, 3, 3, 3, 1, 0, 3):
            tokens = mx.array([position % 50, 7, kept], mx.int32)
            final = model.forward(Batch(tokens, [Span(0, 3, position, caches)])).final
            steps.append(np.array(final.astype(mx.float32)))
            position += kept
            for cache in caches:
                assert cache is not None
                assert cache.rewind(position)
        return steps

    replayed = written()
    assert set(replay._steps) == {1, 3}
    replay._refused = True
    for ours, plain in zip(replayed, written(), strict=True):
        assert np.array_equal(ours, plain)
