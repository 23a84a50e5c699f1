"""Flash Next on an NVIDIA GPU: replayed steps are those layer by layer, and those are what plain MLX gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from arriero.bench import gpu_flash_next
from arriero.kernels.cuda import indexed_few, streams
from arriero.kernels.cuda.gpu import Gpu
from arriero.model.architectures import load_model
from arriero.model.contract import Batch, Span
from arriero.runner.caches.state import WholeState
from arriero.runner.engine import Engine, Limits
from arriero.runner.messages import Failed, SamplingOptions, Submit, Tokens
from arriero.runner.sampling import Sampler
from tests.helpers.bits import same
from tests.helpers.cuda import executed, gpu, plain_mlx

__all__ = ["executed", "gpu"]

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "hc_count": 2,
    "hc_lowrank": 64,
    "indexer_n_heads": 2,
    "indexer_head_dim": 64,
    "indexer_budget": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "ple_layer_ids": [1],
    "ple_embed_dim": 128,
    "ple_conv_kernel_size": 2,
    "ngram_vocab_size_base": 50,
    "heads_per_ngram": 4,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 4,
    "eos_token_id": 95,
    "full_attention_interval": 2,
    "rope_parameters": gpu_flash_next.TEXT["rope_parameters"] | {"partial_rotary_factor": 1.0},
}


@pytest.fixture
def model() -> Any:
    return load_model(gpu_flash_next.checkpoint(gpu_flash_next.config(2, **SMALL)), mx.bfloat16)


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


def steps(forward: Any, caches: list[Any], start: int, count: int) -> list[mx.array]:
    """Final states of some steps of two rows, and all that the rows remember then."""
    made = []
    for position in range(start, start + count):
        spans = [Span(row, 1, position, of_row) for row, of_row in enumerate(caches)]
        found = forward(Batch(mx.array([position, 95 - position], mx.int32), spans))
        made += [found.final, found.for_head]
        mx.eval(made)
    return [*made, *(array for row in caches for cache in row for array in cache.state())]


def test_steps_and_their_states_are_the_same_replayed(executed: Gpu, model: Any, recorded: list[object]) -> None:
    plain = steps(model._by_layers, [model.new_caches(), model.new_caches()], 0, 3)
    assert not recorded
    again = steps(model.forward, [model.new_caches(), model.new_caches()], 0, 3)
    assert len(recorded) == 1
    assert not model._replay._refused
    for a, b in zip(plain, again, strict=True):
        assert same(a, b)


def test_rounds_go_back_inside_a_replayed_step(
    gpu: Gpu, model: Any, recorded: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("arriero.model.layers.replay.WORTH", 1)

    def rounds(forward: Any) -> list[mx.array]:
        caches, start, made = model.new_caches(), 0, []
        whole = [cache for cache in caches if isinstance(cache, WholeState)]
        for kept in (1, 0, 2, 2):
            for cache in whole:
                cache.plan(range(start + 1, start + 3))
            ids = np.arange(start, start + 3, dtype=np.int32)
            final = forward(Batch.of(ids, [Span(0, 3, start, caches)])).final
            captured = {id(cache): [*cache.take(), cache.snapshot()] for cache in whole}
            start += 1 + kept
            for cache in caches:
                assert cache.rewind(start, captured[id(cache)][kept] if id(cache) in captured else None)
            made.append(final[: 1 + kept])
            mx.eval(made)
        return [*made, *(array for cache in whole for array in cache.get())]

    plain, again = rounds(model._by_layers), rounds(model.forward)
    assert len(recorded) == 1
    for a, b in zip(plain, again, strict=True):
        assert same(a, b)


def test_a_step_of_the_kernels_is_that_of_plain_mlx(gpu: Gpu, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    for module, name in ((indexed_few, "attend"), (streams, "norm"), (streams, "mix")):
        original = getattr(module, name)

        def spy(*args: Any, _plain: Any = original, _name: str = name, **how: Any) -> Any:
            used.append(_name)
            return _plain(*args, **how)

        monkeypatch.setattr(module, name, spy)

    def whole() -> list[mx.array]:
        """A prompt of each row, beyond where blocks are missed, and some steps."""
        caches = [model.new_caches() for _ in range(2)]
        spans = [Span(40 * row, 40, 0, caches[row]) for row in range(2)]
        ids = np.arange(80, dtype=np.int32)
        return [model._by_layers(Batch.of(ids, spans)).final, *steps(model._by_layers, caches, 40, 2)]

    ours = whole()
    assert set(used) == {"attend", "norm", "mix"}
    with plain_mlx(monkeypatch):
        plain = whole()
        mx.eval(plain)
    for a, b in zip(ours, plain, strict=True):
        # Buffers grow by more positions on a GPU.
        both = tuple(slice(min(sizes)) for sizes in zip(a.shape, b.shape, strict=True))
        x, y = (np.array(of[both].astype(mx.float32)) for of in (a, b))
        assert np.linalg.norm(x - y) <= 0.05 * np.linalg.norm(y)


def written(model: Any, *, replay: bool) -> list[list[int]]:
    """Greedy replies of two rows side by side, and of a second turn that goes on from stored prefixes."""
    model._replay._refused = not replay
    model._replay._forms.clear()
    engine = Engine(
        model,
        Sampler(SMALL["vocab_size"], 512),
        Limits(512, max_rows=2, prefix_bytes=1 << 28, cache_bytes=1 << 30),
    )
    texts = [[5, 9, 2, 40, 8, 8, 1, 3, 3, 77, 12, 4, 6], [95, 7]]
    for turn in range(2):
        for row, text in enumerate(texts):
            options = SamplingOptions(temperature=0.0)
            engine.submit(Submit(id=f"{turn} {row}", tokens=text, max_tokens=9, stop_tokens=[], sampling=options))
        while engine.busy:
            engine.step()
        for message in engine.drain():
            assert not isinstance(message, Failed), message
            if isinstance(message, Tokens):
                texts[int(message.id.split()[1])] += message.tokens
    return texts


def test_the_engine_writes_the_same_replayed(gpu: Gpu, model: Any) -> None:
    plain = written(model, replay=False)
    assert [len(text) for text in plain] == [13 + 18, 2 + 18]
    assert written(model, replay=True) == plain
    assert any(seen.run is not None for seen in model._replay._forms.values())
