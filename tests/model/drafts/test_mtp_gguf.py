"""Heads for several tokens in GGUF files: a layer past the last, and gains that hold their 1."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from arriero.errors import CheckpointError
from arriero.model.architectures import load_model
from arriero.model.checkpoint import Checkpoint
from arriero.model.drafts import load_head
from arriero.model.drafts.chain import ChainedHead
from arriero.source import GGUFSource
from tests.helpers.drafts import Picks, draft_checkpoint, golden_of, one_row, target_checkpoint, target_states
from tests.helpers.gguf_files import encode, gguf_bytes
from tests.helpers.memory_checkpoint import MemoryCheckpoint
from tests.model.test_gguf_models import numbers
from tests.model.test_qwen3_5_gguf import file_tensors, metadata

NEXTN = {
    "mtp.fc": "eh_proj",
    "mtp.pre_fc_norm_embedding": "enorm",
    "mtp.pre_fc_norm_hidden": "hnorm",
    "mtp.norm": "shared_head_norm",
}


def opened(path: Path, name: str, architecture: str, *, layers: int = 1) -> Checkpoint:
    """The golden target with its head as a GGUF file."""
    target, head = target_checkpoint(name), numbers(draft_checkpoint(name))
    last = target.config["num_hidden_layers"]
    body: dict[str, mx.array] = {}
    tensors = {}
    for key, values in head.items():
        module = key.removesuffix(".weight")
        if module in NEXTN:
            norm = "norm" in module
            tensors[f"blk.{last}.nextn.{NEXTN[module]}.weight"] = values + 1 if norm else values
        elif key.endswith("gate_up_proj"):
            gate, up = np.split(values, 2, axis=1)
            for part, half in (("gate", gate), ("up", up)):
                body[f"model.layers.{last}.mlp.experts.{part}_proj.weight"] = mx.array(half)
        else:
            name_there = key.replace("mtp.layers.0.", f"model.layers.{last}.")
            body[name_there + ("" if key.endswith("weight") else ".weight")] = mx.array(values)
    wide = MemoryCheckpoint(target.config, dict(body))
    tensors |= file_tensors(target, architecture) | file_tensors(wide, architecture)
    more = {f"{architecture}.block_count": last + layers, f"{architecture}.nextn_predict_layers": layers}
    path.write_bytes(
        gguf_bytes(metadata(target.config, architecture) | more, {k: encode("F32", v) for k, v in tensors.items()})
    )
    return Checkpoint.open(GGUFSource((str(path),)))


@pytest.mark.parametrize(("name", "architecture"), [("mtp_qwen3_5", "qwen35"), ("mtp_qwen3_5_moe", "qwen35moe")])
def test_a_head_in_a_gguf_file_gives_the_references_numbers(tmp_path: Path, name: str, architecture: str) -> None:
    checkpoint, golden = opened(tmp_path / "model.gguf", name, architecture), golden_of(name)
    target = load_model(checkpoint, mx.float32)
    head = load_head(checkpoint, target, mx.float32)
    assert isinstance(head, ChainedHead)
    ids, pick = golden["ids"].tolist(), Picks()
    states = target_states(target, ids)[0].for_head
    tokens = head.propose(one_row(ids[1:], 0, head.new_caches()), states[:-1], mx.array(ids[-1:]), 4, pick)
    assert tokens.tolist() == golden["path"].tolist()
    np.testing.assert_allclose(np.stack(pick.scores), golden["scores"], rtol=0, atol=2e-4)
    assert checkpoint.unused() == []


def test_a_gguf_file_without_a_head_has_none_and_one_of_two_layers_is_refused(tmp_path: Path) -> None:
    two = opened(tmp_path / "two.gguf", "mtp_qwen3_5", "qwen35", layers=2)
    target = load_model(two, mx.float32)
    with pytest.raises(CheckpointError, match="one layer, but the file says 2"):
        load_head(two, target, mx.float32)
    plain = target_checkpoint("mtp_qwen3_5")
    path = tmp_path / "none.gguf"
    tensors = {key: encode("F32", value) for key, value in file_tensors(plain, "qwen35").items()}
    path.write_bytes(gguf_bytes(metadata(plain.config, "qwen35"), tensors))
    assert load_head(Checkpoint.open(GGUFSource((str(path),))), target, mx.float32) is None
