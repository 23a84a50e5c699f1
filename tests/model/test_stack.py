"""Plain layers as one operation: the bits of their halves, and caches that everybody else sees as values."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from arriero.kernels.device import native
from arriero.model.architectures import load_model
from arriero.model.contract import Model
from arriero.model.layers.stack import LayerStack
from arriero.model.weight import Quantization
from tests.helpers.forward import Rows, whole
from tests.helpers.memory_checkpoint import MemoryCheckpoint

pytestmark = pytest.mark.skipif(native() is None, reason="one operation for several layers is arriero-cpu's")

GOLDENS = Path(__file__).parent / "goldens"
PROMPT = list(range(3, 40))


def model(name: str, dtype: mx.Dtype = mx.float32) -> Model:
    checkpoint = MemoryCheckpoint.golden(GOLDENS / name).quantized(Quantization("affine", 4, 32), ".weight")
    loaded = load_model(checkpoint.typed(), dtype)
    mx.eval(list(loaded.parameters()))
    return loaded


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers each call of a stack had."""
    made: list[int] = []
    real = LayerStack.__call__

    def counted(self: LayerStack, *what: object) -> mx.array:
        made.append(len(self._attentions))
        return real(self, *what)  # type: ignore[arg-type]

    monkeypatch.setattr(LayerStack, "__call__", counted)
    return made


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("name", ["llama_linear_biases", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_a_stack_of_layers_gives_the_bits_of_layers(
    name: str, dtype: mx.Dtype, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = model(name, dtype)
    found = Rows(loaded, 2)
    got = [found.logits([PROMPT, PROMPT[:5]]), found.logits([[7], [8]])]
    assert calls == [loaded.facts.layers] * 2
    monkeypatch.setattr(LayerStack, "takes", lambda *_: False)
    expected = Rows(loaded, 2)
    want = [expected.logits([PROMPT, PROMPT[:5]]), expected.logits([[7], [8]])]
    assert len(calls) == 2
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_tapped_layer_ends_a_stack(calls: list[int]) -> None:
    loaded = model("gemma3")
    plain = Rows(loaded)
    final = np.array(loaded.forward(plain.batch([PROMPT])).final)
    tapped = Rows(loaded)
    hidden = loaded.forward(tapped.batch([PROMPT], taps=(0, 2)))
    assert calls == [4, 1, 2, 1]
    np.testing.assert_array_equal(np.array(hidden.final), final)
    assert hidden.taps is not None
    assert hidden.taps.shape == (len(PROMPT), 2 * loaded.facts.hidden_size)


@pytest.mark.parametrize("name", ["llama_linear_biases", "gemma3"])
def test_forwards_that_nobody_has_computed_write_before_the_next_one_reads(name: str) -> None:
    loaded = model(name)
    rows = Rows(loaded)
    for start in range(0, 32, 8):  # of all but the last only the caches are wanted
        hidden = loaded.forward(rows.batch([PROMPT[start : start + 8]]))
    last = np.array(loaded.logits(hidden.final))[-1]
    np.testing.assert_array_equal(last, whole(loaded, PROMPT[:32])[-1])


@pytest.mark.parametrize("name", ["llama_linear_biases", "gemma3"])
def test_a_snapshot_keeps_its_values_while_the_row_goes_back_and_is_written_over_in_place(name: str) -> None:
    loaded = model(name)
    rows = Rows(loaded)
    loaded.forward(rows.batch([PROMPT]))  # not computed when the snapshots are taken
    caches = [cache for cache in rows.caches[0] if cache is not None]
    stored = [cache.snapshot() for cache in caches]
    for cache in caches:
        assert cache.rewind(30)
    rows.positions = [30]
    other = PROMPT[:30] + list(range(50, 60))
    np.testing.assert_array_equal(rows.logits([other[30:]])[-1], whole(loaded, other)[-1])

    again = Rows(loaded)
    for cache, snapshot in zip(again.caches[0], stored, strict=True):
        assert cache is not None
        assert snapshot is not None
        assert cache.restore(snapshot)
    again.positions = [len(PROMPT)]
    np.testing.assert_array_equal(again.logits([[9, 10]])[-1], whole(loaded, [*PROMPT, 9, 10])[-1])


def test_states_that_are_read_hold_what_was_written_in_place() -> None:
    loaded = model("llama_linear_biases")
    first, second = Rows(loaded), Rows(loaded)
    for token in PROMPT[:4]:
        loaded.forward(first.batch([[token]]))
    second.logits([PROMPT[:4]])
    for mine, theirs in zip(first.caches[0], second.caches[0], strict=True):
        assert mine is not None
        assert theirs is not None
        for a, b in zip(mine.state(), theirs.state(), strict=True):
            np.testing.assert_array_equal(np.array(a), np.array(b))


@pytest.mark.parametrize("name", ["llama_linear_biases", "gemma3"])
def test_layers_one_by_one_read_what_a_stack_that_nobody_has_computed_writes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = model(name)
    rows = Rows(loaded)
    loaded.forward(rows.batch([PROMPT[:20]]))
    with monkeypatch.context() as patch:
        patch.setattr(LayerStack, "takes", lambda *_: False)
        loaded.forward(rows.batch([PROMPT[20:30]]))
    np.testing.assert_array_equal(rows.logits([PROMPT[30:]])[-1], whole(loaded, PROMPT)[-1])


def test_what_is_restored_comes_behind_what_a_stack_that_nobody_has_computed_writes() -> None:
    loaded = model("llama_linear_biases")
    other, row = Rows(loaded), Rows(loaded)
    other.logits([PROMPT])
    loaded.forward(row.batch([PROMPT[:20] + list(range(60, 80))]))
    for mine, theirs in zip(row.caches[0], other.caches[0], strict=True):
        assert mine is not None
        assert theirs is not None
        tail = theirs.snapshot(20)
        assert tail is not None
        assert mine.rewind(20)
        assert mine.restore(tail)
    row.positions = [len(PROMPT)]
    np.testing.assert_array_equal(row.logits([[9, 10]])[-1], whole(loaded, [*PROMPT, 9, 10])[-1])
