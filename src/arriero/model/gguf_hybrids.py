"""GGUF metadata of Nemotron-H and gpt-oss → fields of a configuration.

Refuses to know MLX.
"""

from __future__ import annotations

import re
from typing import Any

from arriero.errors import CheckpointError
from arriero.model.gguf_keys import Keys


def nemotron_h(keys: Keys, config: dict[str, Any]) -> None:
    """Which kind a layer is follows from two lists: a layer with key heads is attention, one with a width is a
    network or a mixture, any other is Mamba. Layers past the last are those of the head for drafts.
    """
    drafts = keys.integer("nextn_predict_layers") or 0
    layers = config["num_hidden_layers"] - drafts
    heads, width = keys.need("ssm.time_step_rank"), keys.need("ssm.inner_size")
    if layers < 1 or width % heads:
        raise CheckpointError(
            f"{keys.path}: {config['num_hidden_layers']} layers, {drafts} of them for drafts, and {heads} heads of "
            f"{width} numbers together do not fit; pull the model again"
        )
    experts = keys.integer("expert_count") or 0
    lists = _by_layer(keys, "attention.head_count_kv"), _by_layer(keys, "feed_forward_length")
    network = "moe" if experts else "mlp"
    kinds = ["attention" if kv_heads else network if wide else "mamba" for kv_heads, wide in zip(*lists, strict=True)]
    for name in ("partial_rotary_factor", "rope_scaling"):
        # There are no positions, whatever the file says of them.
        config.pop(name, None)
    config |= {
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": drafts,
        "layers_block_type": kinds[:layers],
        "layer_norm_epsilon": keys.number("attention.layer_norm_rms_epsilon")
        or keys.number("attention.layer_norm_epsilon"),
        "mamba_num_heads": heads,
        "mamba_head_dim": width // heads,
        "n_groups": keys.need("ssm.group_count"),
        "ssm_state_size": keys.need("ssm.state_size"),
        "conv_kernel": keys.need("ssm.conv_kernel"),
        "use_bias": _has(keys, "ssm_in.bias"),
        "use_conv_bias": _has(keys, "ssm_conv1d.bias"),
        "attention_bias": _has(keys, "attn_q.bias"),
        "mlp_bias": _has(keys, "ffn_up.bias"),
    }
    if experts:
        config |= {
            "n_routed_experts": experts,
            "num_experts_per_tok": keys.same_for_all_layers("expert_used_count", zeros=True),
            "moe_intermediate_size": keys.same_for_all_layers("expert_feed_forward_length", zeros=True)
            or config.get("intermediate_size"),
            "moe_shared_expert_intermediate_size": keys.need("expert_shared_feed_forward_length"),
            "n_shared_experts": keys.integer("expert_shared_count") or 1,
            "moe_latent_size": keys.integer("moe_latent_size") or None,
            "n_group": keys.integer("expert_group_count") or 1,
            "topk_group": keys.integer("expert_group_used_count") or 1,
            "norm_topk_prob": keys.get("expert_weights_norm", bool) is True,
            "routed_scaling_factor": keys.number("expert_weights_scale") or 1.0,
        }


def gpt_oss(keys: Keys, config: dict[str, Any]) -> None:
    """Files don't say that the model's YaRN keeps its bounds between two frequencies, as every gpt-oss does; those of
    Ollama's library (`gptoss`) don't say that it is YaRN.
    """
    if keys.prefix == "gptoss":
        config["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": keys.number("rope.scaling.factor") or 1.0,
            "original_max_position_embeddings": keys.need("rope.scaling.original_context_length"),
        }
    config |= {
        "num_local_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "intermediate_size": keys.integer("expert_feed_forward_length") or keys.need("feed_forward_length"),
        "sliding_window": keys.need("attention.sliding_window"),
        "attention_bias": True,
    }
    scaling = config.setdefault("rope_scaling", {"rope_type": "default"})
    if scaling["rope_type"] == "yarn":
        scaling["truncate"] = False
    layers, key = config["num_hidden_layers"], "attention.sliding_window_pattern"
    stored = keys.get(key, (int, list))
    if isinstance(stored, list):
        if len(stored) < layers or not all(isinstance(flag, int) for flag in stored):
            raise keys.unusable(key, stored)
        sliding = [bool(flag) for flag in stored[:layers]]
    else:
        every = keys.integer(key) or 2
        sliding = [(layer + 1) % every != 0 for layer in range(layers)]
    config["layer_types"] = ["sliding_attention" if flag else "full_attention" for flag in sliding]


def _by_layer(keys: Keys, key: str) -> list[int]:
    """A list with a whole number for each block."""
    value, blocks = keys.get(key, list), keys.need("block_count")
    if value is None:
        raise CheckpointError(f"{keys.path}: the key {keys.prefix}.{key} must hold a number for every layer")
    if len(value) < blocks or any(not isinstance(item, int) or item < 0 for item in value):
        raise keys.unusable(key, value)
    return list(value[:blocks])


def _has(keys: Keys, name: str) -> bool:
    """Whether any layer has a tensor of this name."""
    return any(re.fullmatch(rf"blk\.\d+\.{re.escape(name)}", tensor) for tensor in keys.tensors)
