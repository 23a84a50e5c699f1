"""Configurations of the GGUF architectures `deepseek2` (DeepSeek V2 and V3, GLM-4 MoE lite) and `glm4moe`.

Refuses to know MLX. Facts that files of some ages don't declare are read from the tensors that they hold.
"""

from __future__ import annotations

from typing import Any

from arriero.errors import CheckpointError
from arriero.model.gguf_keys import Keys

SOFTMAX, SIGMOID = 1, 2
"""Values of `expert_gating_func`."""
LOG_PER_MSCALE = 0.1
"""`rope.scaling.yarn_log_multiplier` of this architecture is YaRN's `mscale_all_dim` times this."""


def deepseek2(keys: Keys, config: dict[str, Any]) -> None:
    """Latent attention, whose keys and values a file makes by one matrix or by two."""
    sigmoid = _scores_by_sigmoid(keys)
    architecture, model_type = (
        ("DeepseekV3ForCausalLM", "deepseek_v3") if sigmoid else ("DeepseekV2ForCausalLM", "deepseek_v2")
    )
    if keys.number("attention.temperature_scale"):
        raise CheckpointError(
            f"{keys.path}: the key {keys.prefix}.attention.temperature_scale is set, which is not supported: "
            "running the model would give wrong answers"
        )
    _routed(keys, config)
    config |= {"architectures": [architecture], "model_type": model_type}
    if not sigmoid:
        config["topk_method"] = "group_limited_greedy" if config["n_group"] > 1 else "greedy"
    rotated = keys.need("rope.dimension_count")
    width = keys.integer("attention.key_length_mla") or keys.need("attention.key_length")
    if width <= rotated:
        raise keys.unusable("rope.dimension_count", rotated)
    config.pop("partial_rotary_factor", None)
    config |= {
        "head_dim": rotated,
        # Files that hold the two matrices count the shared head, older ones every query head.
        "num_key_value_heads": config["num_attention_heads"],
        "kv_lora_rank": keys.need("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": width - rotated,
        "v_head_dim": keys.integer("attention.value_length_mla") or keys.need("attention.value_length"),
    }
    # V2 Lite's queries have no latent, whatever rank its metadata give.
    if "blk.0.attn_q_a.weight" in keys.tensors:
        config["q_lora_rank"] = keys.need("attention.q_lora_rank")
    scaling = config.get("rope_scaling")
    log = keys.number("rope.scaling.yarn_log_multiplier")
    if log and scaling and scaling["rope_type"] == "yarn":
        # Rotated parts get no gain of their own: trained with equal numbers for both.
        gain = float(f"{log / LOG_PER_MSCALE:.6g}")
        scaling |= {"mscale": gain, "mscale_all_dim": gain}


def glm4moe(keys: Keys, config: dict[str, Any]) -> None:
    """Grouped queries; the sizes differ in biases and norms of heads."""
    if not _scores_by_sigmoid(keys):
        raise keys.unusable("expert_gating_func", SOFTMAX)
    _routed(keys, config)
    rotated = keys.integer("rope.dimension_count") or config["head_dim"]
    config |= {
        "attention_bias": "blk.0.attn_q.bias" in keys.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in keys.tensors,
        "partial_rotary_factor": rotated / config["head_dim"],
    }


def _scores_by_sigmoid(keys: Keys) -> bool:
    """Whether experts are scored one by one; files that don't say it have a correction then."""
    function = keys.integer("expert_gating_func")
    if function in (SOFTMAX, SIGMOID):
        return function == SIGMOID
    if function:
        raise keys.unusable("expert_gating_func", function)
    return any(name.endswith(".exp_probs_b.bias") for name in keys.tensors)


def _routed(keys: Keys, config: dict[str, Any]) -> None:
    """Experts; layers past the last are those that predict several tokens."""
    drafts = keys.integer("nextn_predict_layers") or 0
    layers = config["num_hidden_layers"] - drafts
    if layers < 1:
        raise CheckpointError(
            f"{keys.path}: {config['num_hidden_layers']} layers, {drafts} of them for drafts, do not fit; "
            "pull the model again"
        )
    groups = keys.integer("expert_group_count") or 1
    width = keys.same_for_all_layers("expert_feed_forward_length")
    if not width:
        raise keys.unusable("expert_feed_forward_length", width)
    config |= {
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": drafts,
        "first_k_dense_replace": keys.integer("leading_dense_block_count") or 0,
        "n_routed_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "moe_intermediate_size": width,
        "n_shared_experts": keys.integer("expert_shared_count") or 0,
        "n_group": groups,
        "topk_group": keys.integer("expert_group_used_count") or groups,
        "norm_topk_prob": keys.get("expert_weights_norm", bool) is True,
        "routed_scaling_factor": keys.number("expert_weights_scale") or 1.0,
    }
