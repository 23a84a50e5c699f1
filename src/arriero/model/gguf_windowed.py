"""Configurations of the GGUF architectures `cohere2`, `cohere2moe` and `laguna`: windows and positions by layer.

Refuses to know MLX.
"""

from __future__ import annotations

from typing import Any

from arriero.errors import CheckpointError
from arriero.model.gguf_keys import Keys

SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3
"""Values of `expert_gating_func`."""


def cohere2(keys: Keys, config: dict[str, Any]) -> None:
    """The dense model: norms with a mean, a scale of the logits, every fourth layer full."""
    _cohere(keys, config)
    config["rms_norm_eps"] = None
    config["layer_types"] = layer_types(keys, config["num_hidden_layers"], full_first=False)


def cohere2moe(keys: Keys, config: dict[str, Any]) -> None:
    """The mixture: dense layers lead, and have positions whatever they attend to."""
    _cohere(keys, config)
    drafts = keys.integer("nextn_predict_layers") or 0
    layers = config["num_hidden_layers"] - drafts
    dense = keys.integer("leading_dense_block_count") or 0
    if layers < 1 or dense > layers:
        raise CheckpointError(
            f"{keys.path}: {config['num_hidden_layers']} layers, {drafts} of them for drafts and {dense} dense ones, "
            "do not fit; pull the model again"
        )
    if keys.number("attention.layer_norm_rms_epsilon") is None:
        config["rms_norm_eps"] = None
    normalised = keys.get("expert_weights_norm", bool) is True
    function = keys.integer("expert_gating_func") or SIGMOID
    # A softmax of all experts is one of the chosen as soon as their weights are made to sum to one.
    softmax = function == SOFTMAX_OF_CHOSEN or (function == SOFTMAX and normalised)
    if not softmax and function != SIGMOID:
        raise keys.unusable("expert_gating_func", function)
    if (keys.number("expert_weights_scale") or 1.0) != 1.0:
        raise keys.unusable("expert_weights_scale", keys.number("expert_weights_scale"))
    front = config.pop("intermediate_size", None)
    width = keys.same_for_all_layers("expert_feed_forward_length") or front
    shared = keys.integer("expert_shared_count") or 0
    if shared and (keys.integer("expert_shared_feed_forward_length") or shared * width) != shared * width:
        raise keys.unusable("expert_shared_feed_forward_length", keys.integer("expert_shared_feed_forward_length"))
    config |= {
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": drafts,
        "layer_types": layer_types(keys, config["num_hidden_layers"], full_first=True)[:layers],
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (layers - dense),
        "prefix_dense_sliding_window_pattern": 1,
        "prefix_dense_intermediate_size": front,
        "intermediate_size": width,
        "num_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "num_shared_experts": shared,
        "shared_expert_combination_strategy": "average",
        "expert_selection_fn": "softmax" if softmax else "sigmoid",
        "norm_topk_prob": normalised,
    }


def laguna(keys: Keys, config: dict[str, Any]) -> None:
    """Heads and rotary embeddings by layer; the rows of a gate say what it gates."""
    layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    if (keys.integer("expert_gating_func") or SIGMOID) != SIGMOID:
        raise keys.unusable("expert_gating_func", keys.integer("expert_gating_func"))
    heads = keys.get("attention.head_count", (int, list))
    per_layer = heads if isinstance(heads, list) else [heads] * layers
    if len(per_layer) < layers:
        raise keys.unusable("attention.head_count", heads)
    dense = keys.integer("leading_dense_block_count") or 0
    if dense > layers:
        raise keys.unusable("leading_dense_block_count", dense)
    window = keys.integer("attention.sliding_window") or 0
    rotated = keys.integer("rope.dimension_count") or head_dim
    rotated_sliding = keys.integer("rope.dimension_count_swa") or rotated
    theta = config.pop("rope_theta")
    full = {"rope_theta": theta, "partial_rotary_factor": rotated / head_dim, **config.pop("rope_scaling", {})}
    sliding = {
        "rope_theta": keys.number("rope.freq_base_swa") or theta,
        "partial_rotary_factor": rotated_sliding / head_dim,
    }
    config.pop("partial_rotary_factor", None)
    types = layer_types(keys, layers, full_first=True) if window else ["full_attention"] * layers
    config |= {
        "num_attention_heads_per_layer": per_layer[:layers],
        "layer_types": types,
        "sliding_window": window,
        "rope_parameters": {"full_attention": full, "sliding_attention": sliding},
        "attention_bias": "blk.0.attn_q.bias" in keys.tensors,
        "gating": True,
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (layers - dense),
        "num_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "moe_intermediate_size": keys.same_for_all_layers("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.need("expert_shared_feed_forward_length"),
        "norm_topk_prob": keys.get("expert_weights_norm", bool) is not False,
        "moe_routed_scaling_factor": keys.number("expert_weights_scale") or 1.0,
    }


def layer_types(keys: Keys, layers: int, *, full_first: bool) -> list[str]:
    """What each layer attends to: as listed, else one of `attention.sliding_window_pattern` (4) is full."""
    key = "attention.sliding_window_pattern"
    stored = keys.get(key, (int, list))
    if isinstance(stored, list):
        if len(stored) < layers or not all(isinstance(flag, int) for flag in stored):
            raise keys.unusable(key, stored)
        sliding = [bool(flag) for flag in stored[:layers]]
    else:
        every = keys.integer(key) or 4
        first = 0 if full_first else every - 1
        sliding = [layer % every != first for layer in range(layers)]
    return ["sliding_attention" if flag else "full_attention" for flag in sliding]


def _cohere(keys: Keys, config: dict[str, Any]) -> None:
    config |= {
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon") or 1e-5,
        "logit_scale": keys.number("logit_scale") or 1.0,
        "sliding_window": keys.need("attention.sliding_window"),
        "attention_bias": "blk.0.attn_q.bias" in keys.tensors,
    }
