"""What a configuration means that leaves a field out: the reference implementation's default, not a relative's."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from arriero.model.architectures import ARCHITECTURES, check_config

GOLDENS = Path(__file__).parent / "goldens"


def read(values: dict[str, Any]) -> Any:
    """The configuration as its architecture reads it."""
    module = importlib.import_module(f"arriero.model.architectures.{ARCHITECTURES[check_config(values)]}")
    return module.Config.read(values)


def stored(name: str, **changes: Any) -> dict[str, Any]:
    return {**json.loads((GOLDENS / name / "config.json").read_text()), **changes}


@pytest.mark.parametrize(
    ("name", "field", "default"),
    [
        ("deepseek_v2", "n_shared_experts", 2),
        ("deepseek_v2", "routed_scaling_factor", 1.0),
        ("deepseek_v3", "n_shared_experts", 1),
        ("deepseek_v3", "routed_scaling_factor", 2.5),
        ("deepseek_v3", "first_k_dense_replace", 3),
        ("deepseek_v3", "norm_topk_prob", True),
        ("glm4_moe_lite", "n_shared_experts", 1),
        ("glm4_moe_lite", "routed_scaling_factor", 1.8),
        ("glm4_moe", "n_shared_experts", 1),
        ("glm4_moe", "routed_scaling_factor", 1.0),
        ("glm4_moe_plain", "topk_group", 1),
        ("nemotron_h_latent", "topk_group", 1),
        ("nemotron_h_latent", "time_step_limit", [0.0, float("inf")]),
        ("gemma2", "attn_logit_softcapping", 50.0),
        ("gemma2", "final_logit_softcapping", 30.0),
        ("mistral_window", "sliding_window", 4096),
        ("mistral_window", "max_position_embeddings", 131072),
        ("qwen2_window", "sliding_window", 4096),
        ("cohere2", "sliding_window", 4096),
        ("cohere2", "logit_scale", 0.0625),
        ("gpt_oss", "sliding_window", 128),
        ("laguna", "sliding_window", 512),
        ("granite", "attention_multiplier", 1.0),
    ],
)
def test_a_missing_field_means_what_it_means_in_the_reference(name: str, field: str, default: Any) -> None:
    without = stored(name)
    without.pop(field, None)
    assert read(without) == read(stored(name, **{field: default}))


def test_experts_of_deepseek_v3_come_from_four_of_eight_groups_where_nothing_is_said() -> None:
    values = stored("deepseek_v3", n_routed_experts=16)
    for field in ("n_group", "topk_group"):
        values.pop(field)
    assert read(values) == read({**values, "n_group": 8, "topk_group": 4})


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("gemma2", "attn_logit_softcapping"),
        ("gemma2", "final_logit_softcapping"),
        ("mistral_window", "sliding_window"),
        ("qwen2_window", "sliding_window"),
        ("cohere2", "sliding_window"),
    ],
)
def test_null_turns_off_what_is_on_by_default(name: str, field: str) -> None:
    off = read(stored(name, **{field: None}))
    without = stored(name)
    del without[field]
    assert off != read(without)
    if field == "final_logit_softcapping":
        assert off.logit_cap is None
        return
    parts = {"gemma2": lambda: list(off.attention.values()), "mistral_window": lambda: [off.attention]}
    option = "softcap" if "softcapping" in field else "window"
    assert {getattr(part, option) for part in parts.get(name, lambda: off.attention)()} == {None}
