"""What a load decides before the first weight."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from arriero.errors import LoadError
from arriero.model.contract import Batch, Hidden
from arriero.runner.decode import Flight, Pipeline
from arriero.runner.load import WARM_UP_TOKENS, load, warm_up
from arriero.runner.prefill import Chunk
from arriero.runner.row import Row, reserved_bytes
from arriero.source import FolderSource
from tests.helpers.engine_runs import make_engine
from tests.helpers.tiny_model import TinyModel

GOLDEN = Path(__file__).resolve().parent.parent / "model" / "goldens" / "llama"


@pytest.mark.parametrize(("dtype", "value"), [("float32", "0"), ("bfloat16", None)])
def test_float32_keeps_nvidia_products_out_of_tf32(
    dtype: str, value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_ENABLE_TF32", "")
    monkeypatch.delenv("MLX_ENABLE_TF32")
    load(FolderSource(str(GOLDEN)), dtype, lambda _: None)
    assert os.environ.get("MLX_ENABLE_TF32") == value


def test_a_users_own_choice_of_tf32_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_ENABLE_TF32", "1")
    load(FolderSource(str(GOLDEN)), "float32", lambda _: None)
    assert os.environ["MLX_ENABLE_TF32"] == "1"


def test_a_prefill_that_we_dont_know_is_refused_before_anything_is_read() -> None:
    with pytest.raises(LoadError, match="the prefill 'fast' is not known; ARRIERO_PREFILL can be exact or int8"):
        load(FolderSource("/nowhere"), "", lambda _: None, "fast")


@pytest.mark.parametrize(("prefill", "exact"), [("", True), ("exact", True), ("int8", False)])
def test_the_prefill_reaches_every_matrix(prefill: str, exact: bool) -> None:
    model: Any = load(FolderSource(str(GOLDEN)), "bfloat16", lambda _: None, prefill).model
    parts = model.layers[0].feed_forward
    weights = [model.head.weight, parts.down.weight, *(part.weight for part in parts.gate_up.parts)]
    assert [weight.exact for weight in weights] == [exact] * 3


def test_on_a_gpu_every_number_of_rows_decodes_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arriero.runner.load.cuda", object)
    engine = make_engine(TinyModel(), max_rows=16)
    steps: Counter[int] = Counter()
    build = engine._pipeline.build

    def counted(rows: list[Row], chunks: list[Chunk], settle: bool) -> Flight:
        steps[len(rows)] += not chunks
        return build(rows, chunks, settle)

    monkeypatch.setattr(Pipeline, "build", lambda self, *how, **named: counted(*how, **named))
    warm_up(engine)
    # An ordinary step, one that is recorded, one that is replayed.
    assert all(steps[rows] >= 3 for rows in range(1, 9))


@pytest.mark.parametrize(("rows_that_fit", "most"), [(100, 8), (3, 3), (0, 1)])
def test_on_a_gpu_no_more_rows_warm_up_than_half_of_its_free_memory_holds(
    rows_that_fit: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("arriero.runner.load.cuda", object)
    model = TinyModel()
    engine = make_engine(model, max_rows=16)
    free = 2 * rows_that_fit * reserved_bytes(WARM_UP_TOKENS + 64, model.facts)
    monkeypatch.setattr(mx, "get_memory_limit", lambda: free)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 0)
    side_by_side = []
    build = Pipeline.build

    def counted(self: Pipeline, rows: list[Row], chunks: list[Chunk], settle: bool) -> Flight:
        side_by_side.append(len(rows))
        return build(self, rows, chunks, settle)

    monkeypatch.setattr(Pipeline, "build", counted)
    warm_up(engine)
    assert max(side_by_side) == most


def test_a_model_that_has_no_memory_for_several_rows_is_loaded_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arriero.runner.load.cuda", object)

    class Large(TinyModel):
        def forward(self, batch: Batch) -> Hidden:
            if len(batch.spans) > most:
                raise RuntimeError("Unable to allocate 1 bytes")
            return super().forward(batch)

    most = 1
    engine = make_engine(Large())
    warm_up(engine)
    assert not engine.busy
    most = 0
    with pytest.raises(LoadError, match="cannot answer"):
        warm_up(engine)
