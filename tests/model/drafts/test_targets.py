"""What models hand to drafts: taps, rows of their tables, and bare logits, all as the reference has them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from arriero.errors import CheckpointError, UnsupportedFeature
from arriero.model.architectures import load_model
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Batch, Hidden, Model, ModelFacts, RowCaches
from arriero.model.drafts import load_draft
from arriero.source import FolderSource
from tests.helpers.drafts import GOLDENS, TARGETS, draft_checkpoint, target_of, target_states
from tests.helpers.forward import Rows

with np.load(GOLDENS / "targets.npz") as file:
    GOLDEN = dict(file)
NAMES = sorted(name.removesuffix(".taps") for name in GOLDEN if name.endswith(".taps"))
POSITIONS = [3, 17, 38, 39]
TOLERANCE = 2e-4


def checkpoint_of(name: str) -> Checkpoint:
    return Checkpoint.open(FolderSource(str(TARGETS / name)))


@pytest.fixture(params=NAMES, scope="module")
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(name: str) -> Model:
    return load_model(checkpoint_of(name), mx.float32)


@pytest.fixture(scope="module")
def ids(name: str) -> list[int]:
    with np.load(TARGETS / name / "golden.npz") as golden:
        found: list[int] = golden["ids"].tolist()
    return found


@pytest.fixture(scope="module")
def hidden(model: Model, ids: list[int]) -> Hidden:
    return target_states(model, ids, range(model.facts.layers))[0]


def test_taps_are_the_outputs_of_the_references_layers(name: str, model: Model, hidden: Hidden) -> None:
    assert hidden.taps is not None
    assert hidden.taps.shape == (40, model.facts.layers * model.facts.hidden_size)
    np.testing.assert_allclose(np.array(hidden.taps)[POSITIONS], GOLDEN[f"{name}.taps"], rtol=1e-5, atol=TOLERANCE)


def test_raw_logits_have_no_cap_and_no_scale(name: str, model: Model, hidden: Hidden) -> None:
    found = np.array(model.raw_logits(hidden.final[mx.array(POSITIONS)]))
    np.testing.assert_allclose(found, GOLDEN[f"{name}.raw"], rtol=1e-5, atol=TOLERANCE)


def test_rows_are_those_of_the_table(name: str, model: Model, ids: list[int]) -> None:
    checkpoint = checkpoint_of(name)
    table = next(n for n in checkpoint.names() if n.endswith(("embed_tokens.weight", "embeddings.weight")))
    expected = checkpoint.tensor(table).astype(mx.float32)[mx.array(ids)]
    np.testing.assert_array_equal(np.array(model.embed(mx.array(ids))), np.array(expected))


def test_only_gemma_scales_its_rows(name: str, model: Model) -> None:
    scale = model.facts.hidden_size**0.5 if name.startswith("gemma") else 1.0
    assert model.facts.embedding_scale == scale


def test_taps_come_in_the_order_asked_for_and_change_nothing(model: Model, ids: list[int], hidden: Hidden) -> None:
    assert hidden.taps is not None
    last, width = model.facts.layers - 1, model.facts.hidden_size
    rows = Rows(model)
    some = model.forward(rows.batch([ids], taps=[last, 0]))
    assert some.taps is not None
    whole = np.array(hidden.taps)
    np.testing.assert_array_equal(np.array(some.taps), np.concatenate([whole[:, -width:], whole[:, :width]], axis=1))
    plain = target_states(model, ids)[0]
    assert plain.taps is None
    np.testing.assert_array_equal(np.array(plain.final), np.array(hidden.final))


def test_chunks_and_neighbours_change_no_tap(model: Model, ids: list[int], hidden: Hidden) -> None:
    assert hidden.taps is not None
    rows, layers, parts = Rows(model, 2), range(model.facts.layers), []
    for low, high, other in ((0, 13, []), (13, 14, ids[:5]), (14, 40, ids[5:6])):
        found = model.forward(rows.batch([ids[low:high], other], taps=layers))
        assert found.taps is not None
        parts.append(np.array(found.taps)[: high - low])
    np.testing.assert_array_equal(np.concatenate(parts), np.array(hidden.taps))


class Foreign:
    """A model that gives drafts nothing, or rows of another width."""

    def __init__(self, facts: ModelFacts, width: int | None) -> None:
        self.facts = facts
        self.width = width

    @classmethod
    def load(cls, checkpoint: Any, dtype: mx.Dtype) -> Foreign:
        raise AssertionError

    def new_caches(self) -> RowCaches:
        return []

    def forward(self, batch: Batch) -> Hidden:
        raise AssertionError

    def logits(self, hidden: mx.array) -> mx.array:
        raise AssertionError

    def embed(self, tokens: mx.array) -> mx.array:
        if self.width is None:
            raise UnsupportedFeature("it gives no token rows to drafts")
        return mx.zeros((len(tokens), self.width))

    def raw_logits(self, hidden: mx.array) -> mx.array:
        return mx.zeros((len(hidden), self.facts.vocab_size))

    def parameters(self) -> Iterable[mx.array]:
        return []


@pytest.mark.parametrize(
    ("width", "message"),
    [(None, "Qwen3ForCausalLM takes no draft: it gives no token rows"), (48, "is 64 .* and 48 in")],
)
def test_a_model_that_gives_drafts_nothing_is_refused_at_load(width: int | None, message: str) -> None:
    target = Foreign(target_of("dflash_full").facts, width)
    with pytest.raises(CheckpointError, match=message):
        load_draft(draft_checkpoint("dflash_full").typed(), target, mx.float32)  # type: ignore[arg-type]
