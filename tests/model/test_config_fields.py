"""No field of a configuration is passed over: each changes the numbers, is refused, or is known not to count."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from arriero.errors import ArrieroError
from arriero.model.architectures import load_model
from arriero.model.checkpoint import Checkpoint
from arriero.source import FolderSource
from tests.helpers.forward import whole

GOLDENS = Path(__file__).parent / "goldens"
WITHOUT_EFFECT = {
    "which model it is, and tokens": {
        "architectures", "model_type", "transformers_version", "dtype", "bos_token_id", "pad_token_id",
    },
    "for training, or for other implementations": {
        "attention_dropout", "initializer_range", "use_cache", "pretraining_tp", "output_router_logits",
        "router_aux_loss_coef", "num_logits_to_keep", "rescale_prenorm_residual", "time_step_floor", "time_step_max",
        "time_step_min", "use_mamba_kernels", "chunk_size", "moe_shared_expert_overlap",
        "hidden_dropout",
    },
    "follows from others": {"qk_head_dim", "expand", "_sliding_window_pattern", "number_of_conv_states"},
    "another field of the same files goes before it": {"max_window_layers", "rope_theta", "sliding_window_pattern"},
    "between two of the few frequencies of so small a head": {
        "rope_parameters.full_attention.beta_fast", "rope_parameters.full_attention.original_max_position_embeddings",
    },
    "the length of the context": {"max_position_embeddings"},
    "states are float32 whatever it says": {"mamba_ssm_cache_dtype"},
    "heads for drafts": {"num_nextn_predict_layers", "mtp_layers_block_type"},
    "the tensors decide": {"quantization_config.quant_method", "quantization_config.modules_to_not_convert"},
}  # fmt: skip


def others(value: Any) -> list[Any]:
    """Values of the same kind, or of any where there is none."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, max(0, value - 1), 2 * value]
    if isinstance(value, float):
        return [1.7 * value, 0.3 * value]
    if isinstance(value, str):
        return ["nonsense"]
    if isinstance(value, list):
        return [value[::-1], value[:-1]]
    return [3, True, "nonsense"]


def fields(values: dict[str, Any], *path: str) -> Iterator[tuple[str, ...]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from fields(value, *path, name)
        else:
            yield (*path, name)


def counts(folder: Path, path: tuple[str, ...], ids: list[int], expected: np.ndarray) -> bool:
    """Whether another value is refused or changes the logits; anything but a refusal of ours is raised."""
    before = Checkpoint.open(FolderSource(str(folder))).config
    for name in path:
        before = before[name]
    for value in others(before):
        checkpoint = Checkpoint.open(FolderSource(str(folder)))
        section = checkpoint.config = copy.deepcopy(checkpoint.config)
        for name in path[:-1]:
            section = section[name]
        section[path[-1]] = value
        try:
            found = whole(load_model(checkpoint, mx.float32), ids)
        except ArrieroError:
            return True
        if found.shape != expected.shape or not np.array_equal(found, expected):
            return True
    return False


def test_every_field_counts_or_is_known_not_to(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    known = set().union(*WITHOUT_EFFECT.values())
    seen: set[str] = set()
    counted: set[str] = set()
    for folder in sorted(path for path in GOLDENS.iterdir() if path.is_dir()):
        with np.load(folder / "golden.npz") as file:
            ids = file["ids"].tolist()[:30]
        checkpoint = Checkpoint.open(FolderSource(str(folder)))
        expected = whole(load_model(checkpoint, mx.float32), ids)
        for path in fields(checkpoint.config):
            name = ".".join(path)
            # What is known not to count is tried once.
            settled = name in counted or (name in known and name in seen)
            seen.add(name)
            if not settled and counts(folder, path, ids, expected):
                counted.add(name)
    assert sorted(seen - counted - known) == []
    assert sorted(known - (seen - counted)) == []
