"""The real engine on the Metal kernels: rows side by side, prefixes, and a second turn give the tokens of plain MLX."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import tests.model
from arriero.kernels import device
from arriero.model.architectures import load_model
from arriero.model.checkpoint import Checkpoint
from arriero.model.weight import Quantization
from arriero.source import FolderSource
from tests.helpers.engine_runs import make_engine, run, submit
from tests.helpers.memory_checkpoint import MemoryCheckpoint
from tests.metal.launches import runnable
from tests.metal.turned_on import calls

__all__ = ["calls"]

pytestmark = runnable

GOLDENS = Path(tests.model.__file__).parent / "goldens"
PROMPTS = [[5, 9, 2, 40], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18]]
NEW = 5


def written(model: Any) -> list[list[int]]:
    """Greedy replies of two turns, the second behind what the first left in the store."""
    engine = make_engine(model, max_rows=len(PROMPTS), prefill_chunk=16, prefix_bytes=1 << 28, cache_bytes=1 << 30)
    texts = [list(prompt) for prompt in PROMPTS]
    for turn in range(2):
        for row, text in enumerate(texts):
            engine.submit(submit(f"{turn} {row}", text, NEW))
        for name, reply in run(engine).items():
            assert reply.reason == "length", reply.end
            texts[int(name.split()[1])] += [*reply.tokens, 3 + turn]
    return texts


@pytest.mark.parametrize(
    ("name", "how", "kernels"),
    [
        ("qwen3", Quantization("mxfp8", 8, 32), {"attention", "product", "rows", "argmax"}),
        ("qwen3_moe", Quantization("affine", 4, 32), {"attention", "product", "rows", "argmax"}),
        ("qwen3_5_moe", Quantization("mxfp4", 4, 32), {"attention", "product", "depthwise_conv", "gated_delta"}),
        ("qwen4_exp", None, {"attention", "depthwise_conv", "gated_delta", "topk", "argmax"}),
    ],
)
def test_rows_of_two_turns_write_what_plain_mlx_writes(
    monkeypatch: pytest.MonkeyPatch, calls: Counter[str], name: str, how: Quantization | None, kernels: set[str]
) -> None:
    if how is None:
        checkpoint = Checkpoint.open(FolderSource(str(GOLDENS / name)))
    else:
        checkpoint = MemoryCheckpoint.golden(GOLDENS / name).quantized(how, ".weight").typed()
    model = load_model(checkpoint, mx.float32)
    made = written(model)
    assert kernels <= set(calls)
    monkeypatch.setattr(device, "metal", lambda: False)
    calls.clear()
    assert written(model) == made
    assert not calls
