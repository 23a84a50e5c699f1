"""Models whose operations take the Metal kernels give the reference's logits."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import tests.model
from arriero.model.architectures import load_model
from arriero.model.checkpoint import Checkpoint
from arriero.model.weight import Quantization
from arriero.source import FolderSource
from tests.helpers.forward import chunked
from tests.helpers.memory_checkpoint import MemoryCheckpoint
from tests.metal.launches import runnable
from tests.metal.turned_on import calls

__all__ = ["calls"]

pytestmark = runnable

GOLDENS = Path(tests.model.__file__).parent / "goldens"


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("qwen4_exp", {"attention", "topk", "gated_delta", "depthwise_conv", "heads"}),  # attention over listed blocks
        ("qwen3_5", {"attention", "gated_delta", "depthwise_conv", "heads"}),
        ("gpt_oss_mxfp4", {"attention", "topk", "product", "heads"}),  # sinks, window, experts
        ("gemma2", {"attention", "heads"}),  # soft cap, window
    ],
)
def test_logits_of_chunks_and_steps_are_those_of_the_reference(
    calls: Counter[str], name: str, kernels: set[str]
) -> None:
    with np.load(GOLDENS / name / "golden.npz") as file:
        ids, logits = file["ids"].tolist(), file["logits"]
    model = load_model(Checkpoint.open(FolderSource(str(GOLDENS / name))), mx.float32)
    np.testing.assert_allclose(chunked(model, ids, (11, 1, 3)), logits, rtol=0, atol=2e-4)
    assert set(calls) == kernels


def test_packed_matrices_give_what_their_values_give(calls: Counter[str]) -> None:
    packed = MemoryCheckpoint.golden(GOLDENS / "qwen3").quantized(Quantization("mxfp8", 8, 32), ".weight")
    ids = list(range(3, 20))
    made = chunked(load_model(packed.typed(), mx.float32), ids, (9, 1))
    assert set(calls) == {"attention", "product", "rows", "heads"}
    want = chunked(load_model(packed.dequantized().typed(), mx.float32), ids, (9, 1))
    np.testing.assert_allclose(made, want, rtol=0, atol=2e-4)
