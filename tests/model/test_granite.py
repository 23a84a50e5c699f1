"""What only Granite does: its four factors, and Llama's layers where they are neutral."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from arriero.errors import CheckpointError
from arriero.model.architectures import load_model
from tests.helpers.forward import whole
from tests.helpers.memory_checkpoint import MemoryCheckpoint

pytestmark = pytest.mark.usefixtures("kernels")

GOLDENS = Path(__file__).parent / "goldens"
IDS = list(range(3, 40))


def logits(checkpoint: MemoryCheckpoint) -> np.ndarray:
    return whole(load_model(checkpoint.typed(), mx.float32), IDS)


def test_neutral_factors_make_it_llama() -> None:
    llama = MemoryCheckpoint.golden(GOLDENS / "llama")
    factors = {"attention_multiplier": 16**-0.5}
    granite = llama.copy(architectures=["GraniteForCausalLM"], model_type="granite", head_dim=None, **factors)
    np.testing.assert_allclose(logits(granite), logits(llama), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"]
)
def test_each_factor_counts(name: str) -> None:
    golden = MemoryCheckpoint.golden(GOLDENS / "granite")
    assert np.abs(logits(golden.copy(**{name: 1.0})) - logits(golden)).max() > 0.01


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"residual_multiplier": "0.7"}, "`residual_multiplier` should be a number"),
        ({"logits_scaling": 0}, "`logits_scaling` should be a positive number"),
        ({"sliding_window": 8}, "`sliding_window` is 8, which GraniteForCausalLM does not honour"),
        ({"num_local_experts": 4}, "`num_local_experts` is 4, which GraniteForCausalLM does not honour"),
    ],
)
def test_what_is_wrong_or_not_honoured_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        logits(MemoryCheckpoint.golden(GOLDENS / "granite").copy(**changes))
