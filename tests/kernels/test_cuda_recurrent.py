"""Models with recurrent states on an NVIDIA GPU: replayed steps give what forwards layer by layer give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import pytest

from arriero.bench.gpu_models import random_model
from arriero.bench.gpu_shapes import CONFIGS
from arriero.kernels import device
from arriero.kernels.cuda.gpu import Gpu
from arriero.kernels.cuda.source import Kernel
from arriero.model.contract import Batch, Span
from arriero.model.quantization import Quantization
from arriero.runner.caches.state import RecurrentCache
from tests.helpers.bits import same
from tests.helpers.cuda import error, exact, executed

__all__ = ["executed"]

SMALL = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "vocab_size": 64,
}
DENSE = CONFIGS["Qwen3.8-27B"] | SMALL | {"intermediate_size": 128}
SPARSE = CONFIGS["Qwen3.5-35B-A3B"] | SMALL
SPARSE |= {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "num_experts": 6}
SPARSE |= {"num_experts_per_tok": 2}


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What has been recorded."""
    made: list[object] = []
    compiled = mx.compile

    def record(function: Callable[..., Any], **how: Any) -> Callable[..., Any]:
        made.append(function)
        return compiled(function, **how)

    monkeypatch.setattr(mx, "compile", record)
    return made


def model_of(config: dict[str, Any]) -> Any:
    mx.random.seed(11)
    return random_model(config, Quantization("nvfp4", 4, 16))


@pytest.fixture
def dense(executed: Gpu) -> Any:
    return model_of(DENSE)


def states(caches: Sequence[Any]) -> list[mx.array]:
    return [array for cache in caches for array in cache.state()]


@pytest.mark.parametrize("config", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_kernels_give_what_plain_operations_give(
    executed: Gpu, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(config)
    launched: list[str] = []
    run = Kernel.__call__

    def count(kernel: Kernel, *args: Any, **how: Any) -> list[mx.array]:
        launched.append(kernel.name)
        return run(kernel, *args, **how)

    monkeypatch.setattr(Kernel, "__call__", count)

    def steps() -> list[mx.array]:
        caches, made = model.new_caches(), []
        for position in range(2):
            batch = Batch(mx.array([5 + position], mx.int32), [Span(0, 1, position, caches)])
            made.append(model._by_layers(batch).final)
            mx.eval(made[-1])
        return made + [array.astype(mx.float32) for array in states(caches[:1])]

    ours = steps()
    assert set(launched) >= {"product", "gated_delta", "heads", "gate_heads", "attention"}
    assert ("sparse" in launched) == ("num_experts" in config)
    monkeypatch.setattr(device, "cuda", lambda: None)
    for a, b in zip(ours, steps(), strict=True):
        assert error(a, exact(b)) < 0.03


def test_steps_and_their_states_are_the_same_replayed(dense: Any, recorded: list[object]) -> None:
    def steps(forward: Any) -> list[mx.array]:
        caches = [dense.new_caches() for _ in range(2)]
        made: list[mx.array] = []
        for position in range(3):
            spans = [Span(0, 1, position, caches[0]), Span(1, 1, position, caches[1])]
            made.append(forward(Batch(mx.array([position, position + 9], mx.int32), spans)).final)
            mx.eval(made[-1])
        return [*made, *states(caches[0]), *states(caches[1])]

    plain = steps(dense._by_layers)
    assert not recorded
    again = steps(dense.forward)
    assert len(recorded) == 1
    for a, b in zip(plain, again, strict=True):
        assert same(a, b)


def test_rounds_go_back_to_states_inside_a_replayed_step(
    dense: Any, recorded: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("arriero.model.layers.replay.WORTH", 1)
    stays = [1, 0, 2]

    def rounds(forward: Any) -> list[mx.array]:
        caches, start, made = dense.new_caches(), 0, []
        for kept in stays:
            states_of = [cache for cache in caches if isinstance(cache, RecurrentCache)]
            for cache in states_of:
                cache.plan(range(start + 1, start + 3))
            final = forward(Batch(mx.arange(start, start + 3, dtype=mx.int32), [Span(0, 3, start, caches)])).final
            captured = {id(cache): [*cache.take(), cache.snapshot()] for cache in states_of}
            start += 1 + kept
            for cache in caches:
                assert cache.rewind(start, captured[id(cache)][kept] if id(cache) in captured else None)
            made.append(final[: 1 + kept])
            mx.eval(made)
        return [mx.concatenate(made), *(array for cache in states_of for array in cache.get())]

    plain, again = rounds(dense._by_layers), rounds(dense.forward)
    assert len(recorded) == 1
    caches, alone = dense.new_caches(), []
    for position in range(len(plain[0])):
        alone.append(dense.forward(Batch(mx.array([position], mx.int32), [Span(0, 1, position, caches)])).final)
        # Steps write in place, in the order in which they are started.
        mx.eval(alone[-1])
    for a, b in zip(plain, again, strict=True):
        assert same(a, b)
    again = [array for cache in caches if isinstance(cache, RecurrentCache) for array in cache.get()]
    for a, b in zip(plain[1:], again, strict=True):
        assert mx.allclose(a.astype(mx.float32), b.astype(mx.float32), rtol=0.05, atol=0.02)
    assert mx.allclose(mx.concatenate(alone), plain[0], rtol=0.05, atol=0.05)


def test_a_snapshot_keeps_its_state_while_replayed_steps_go_on(dense: Any) -> None:
    caches = dense.new_caches()

    def step(position: int) -> mx.array:
        made: mx.array = dense.forward(Batch(mx.array([7 + position], mx.int32), [Span(0, 1, position, caches)])).final
        mx.eval(made)
        return made

    for position in range(3):
        step(position)
    kept = [cache.snapshot() for cache in caches]
    first = [step(position) for position in range(3, 6)]
    for cache, snapshot in zip(caches, kept, strict=True):
        assert cache.rewind(3, snapshot)
    for position, before in enumerate(first, 3):
        assert same(step(position), before)
