"""Published shapes made small, for what is measured on GPUs and tested on CPUs."""

from __future__ import annotations

from typing import Any

from arriero.bench.gpu_drafts import DRAFTS
from arriero.bench.gpu_shapes import CONFIGS

_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "vocab_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 6,
}
_EXPERTS = {"num_experts": 128, "moe_intermediate_size": 128}
_SHARED = {"shared_expert_intermediate_size": 128}
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
_GEMMA = {"num_global_key_value_heads": 1, "head_dim": 64, "global_head_dim": 128, "sliding_window": 32}


def small(name: str, **changes: Any) -> dict[str, Any]:
    """The configuration of this name with few layers and narrow ones."""
    config = CONFIGS[name]
    sizes = [_SIZES, _EXPERTS, _SHARED, _DELTA, _GEMMA]
    return config | {k: v for part in sizes for k, v in part.items() if k in config} | changes


def small_draft(name: str) -> dict[str, Any]:
    """The draft of the target `small(name)`."""
    config = DRAFTS[name]
    own = config["dflash_config"] | {"mask_token_id": 7, "target_layer_ids": [1, 2, 3, 4], "selector_rank": 128}
    changed = {k: v for k, v in _SIZES.items() if k != "num_hidden_layers"}
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2, "num_target_layers": 6}
    return config | changed | layers | {"dflash_config": own}
