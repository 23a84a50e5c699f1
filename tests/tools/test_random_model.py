"""A model with random weights, for measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from arriero.runner.load import load
from arriero.source import GGUFSource
from tests.helpers.forward import whole
from tools.random_model import DEVIATION, Shape, write

TINY = Shape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, inner=96, vocab=128, context=256)


@pytest.mark.parametrize(("kind", "head", "bits"), [("Q4_1", "Q8_0", [4, 8]), ("Q4_0", "Q4_0", [4, 4])])
def test_it_is_a_model_that_runs(kind: str, head: str, bits: list[int], tmp_path: Path) -> None:
    path = tmp_path / "random.gguf"
    write(path, TINY, kind, head)
    assert [file.name for file in tmp_path.iterdir()] == ["random.gguf"]
    model: Any = load(GGUFSource((str(path),)), "float32", lambda _: None).model
    held = [model.layers[1].feed_forward.down.weight, model.head.weight]
    assert [weight.quantization.bits for weight in held] == bits
    rows = np.array(model.embed(mx.arange(TINY.vocab)))
    assert rows.std() == pytest.approx(DEVIATION, rel=0.1)
    assert np.isfinite(whole(model, list(range(20)))).all()


def test_the_default_is_as_large_as_the_one_that_it_stands_for() -> None:
    shape = Shape()
    weights = shape.vocab * shape.hidden + sum(rows * columns for _, rows, columns in shape.matrices())
    assert round(weights / 1e6) == 1236
