"""What loading a model with a table of 2 GB takes, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.load_memory import resident
from tools.flash_next_checkpoint import PUBLISHED, text_config, write_model

SMALL = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "hc_lowrank": 32,
    "indexer_head_dim": 32,
    "indexer_budget": 64,
    "num_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "ple_embed_dim": 256,
    "eos_token_id": 1,
    "rope_parameters": {**PUBLISHED["rope_parameters"], "mrope_section": [3, 3, 2]},
}
LAYERS = ["linear_attention", "full_attention"]
ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="this system does not tell what is resident")
def test_a_table_of_two_gigabytes_takes_no_memory(tmp_path: Path) -> None:
    write_model(tmp_path / "small", text_config(LAYERS, **SMALL, vocab_size=512, ngram_vocab_size_base=1000))
    large = text_config(LAYERS, **SMALL, vocab_size=400_000, ngram_vocab_size_base=15_000_000)
    sizes = write_model(tmp_path / "large", large, sparse_table=True)
    assert sizes["table"] > 2e9
    assert resident() > 10_000_000
    command = [sys.executable, "-m", "tests.helpers.load_memory", str(tmp_path / "small"), str(tmp_path / "large")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)
    others = sizes["dense"] + sizes["experts"]
    assert 0.9 * others < figures["arrays"] < 1.02 * others
    assert figures["active"] < 1.02 * others
    # What is loaded is read piece by piece (64 MiB); nothing as large as the table was ever there.
    assert figures["peak"] < 1.02 * others + 2 * 64 * 2**20
    assert 0.9 * others < figures["resident"] < 1.05 * others
    assert figures["table"] < 1_000_000
    assert figures["after"] < 1.05 * others + 64 * 2**20
