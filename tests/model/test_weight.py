"""What happens to the arrays of a checkpoint when the CPU kernels take a matrix over, and to parts that are joined."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from arriero.kernels import device
from arriero.model.layers.decoder import arrays
from arriero.model.layers.embedding import Embedding
from arriero.model.layers.linear import FusedLinear, Linear
from arriero.model.layers.mlp import GatedMLP
from arriero.model.layers.norm import RMSNorm
from arriero.model.weight import Quantization, Weight, concatenate_rows
from arriero.runner.load import load
from arriero.source import GGUFSource
from tests.helpers.memory_checkpoint import quantize
from tools.random_model import Shape, write

pytestmark = pytest.mark.skipif(device.native() is None, reason="arriero-cpu is not installed, or there is a GPU")

BLOCK = 8 << 20
"""Memory that small packed matrices share."""

HOW = Quantization("affine", 4, 32)


def random(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def weight(rows: int = 48, columns: int = 64, seed: int = 0) -> Weight:
    return quantize(random(rows, columns, seed=seed), HOW)


def test_it_is_packed_once_for_all_who_hold_it_and_keeps_its_shape() -> None:
    w = weight()
    first = w.packed()
    assert first is not None
    assert w.packed() is first
    assert w.shape == (48, 64)
    assert first.nbytes <= w.nbytes == sum(array.nbytes for array in w.arrays())


def test_its_rows_cannot_be_taken_any_more_and_it_says_why() -> None:
    w = weight()
    rows = w.rows(slice(0, 16))
    w.packed()
    with pytest.raises(
        RuntimeError, match=r"the data of this matrix were repacked .* take rows, and join matrices, before"
    ):
        w.rows(slice(0, 16))
    assert rows.shape == (16, 64)
    with pytest.raises(AttributeError):
        w.codes  # noqa: B018


def test_a_copy_made_before_is_a_matrix_of_its_own() -> None:
    w = weight()
    copy = replace(w, exact=False)
    w.packed()
    assert copy.data.shape == (48, 8)
    assert not copy.exact


def test_a_tied_head_and_its_table_hold_one_matrix() -> None:
    w = weight()
    table = Embedding(w, mx.float32)
    head = table.as_linear()
    held = {id(array): array for array in arrays([table, head])}
    assert sum(array.nbytes for array in held.values()) == w.nbytes
    rows = np.array(table(mx.arange(48)))
    x = random(3, 64, seed=3)
    np.testing.assert_allclose(np.array(head(x)), np.array(x) @ rows.T, rtol=2e-5, atol=2e-5)


def test_layers_of_one_input_are_joined_before_they_are_packed() -> None:
    parts = [Linear(weight(rows, seed=rows)) for rows in (10, 20, 5)]
    x = random(3, 64, seed=3)
    alone = [np.array(Linear(replace(part.weight))(x)) for part in parts]
    fused = FusedLinear(parts)
    assert len(fused.parts) == 1
    for mine, theirs in zip(fused(x), alone, strict=True):
        np.testing.assert_array_equal(np.array(mine), theirs)


def test_a_half_of_a_layer_alone_is_counted_too() -> None:
    layer = GatedMLP(Linear(weight(32, 64)), Linear(weight(32, 64, 1)), Linear(weight(64, 32, 2)), "silu")
    part = layer.part(RMSNorm(mx.ones(64), 1e-6))
    whole = sum(array.nbytes for array in arrays([layer]))
    held = {id(array): array for array in arrays([part])}
    assert sum(array.nbytes for array in held.values()) == whole + 64 * 4
    assert len({id(array) for array in arrays([layer, part])}) == len(held)


def test_the_original_is_let_go() -> None:
    # Large enough for memory of its own: smaller matrices share blocks.
    w = quantize(random(8192, 1024), HOW)
    mx.eval(w.data, w.scales, w.biases)
    before = mx.get_active_memory()
    size = w.nbytes
    mx.eval(w.arrays())
    assert abs(mx.get_active_memory() - before - (w.nbytes - size)) < 100_000


def test_a_load_never_holds_much_more_than_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(layers=12, hidden=512, heads=8, kv_heads=4, head_dim=64, inner=1536, vocab=4096, context=256)
    write(tmp_path / "m.gguf", shape, "Q4_1", "Q8_0")
    monkeypatch.setattr("arriero.runner.load.PIECE_BYTES", 1 << 20)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    loaded = load(GGUFSource((str(tmp_path / "m.gguf"),)), "bfloat16", lambda _: None)
    files = (tmp_path / "m.gguf").stat().st_size
    assert loaded.weight_bytes > 0.9 * files > 2 * BLOCK
    assert mx.get_active_memory() - before - loaded.weight_bytes < BLOCK + 500_000
    # The largest matrix is in memory twice for a moment.
    assert mx.get_peak_memory() - before - loaded.weight_bytes < BLOCK + 2 * 4096 * 512 * 1.2 + 1_000_000


@pytest.mark.parametrize(("shape", "scale"), [((3, 8, 32), [1.0, 2.0, 3.0]), ((8, 32), [2.0])])
def test_parts_of_one_matrix_become_one_again(shape: tuple[int, ...], scale: list[float]) -> None:
    w, scales = mx.quantize(mx.random.normal(shape), group_size=16, bits=4, mode="nvfp4")
    whole = Weight(w, Quantization("nvfp4", 4, 16), scales, None, mx.array(scale) if len(shape) == 3 else mx.array(2.0))
    joined = concatenate_rows([whole.rows(slice(0, 4)), whole.rows(slice(4, None))])
    assert joined is not None
    assert joined.global_scale is whole.global_scale
    assert mx.array_equal(joined.data, whole.data)
    other = replace(whole, global_scale=whole.global_scale + 0)
    assert concatenate_rows([whole.rows(slice(0, 4)), other.rows(slice(4, None))]) is None
