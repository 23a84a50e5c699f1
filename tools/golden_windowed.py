"""Tiny configurations of Laguna and Cohere 2, whose layers take turns between windows and everything."""

from __future__ import annotations

from typing import Any

SLIDING, FULL = "sliding_attention", "full_attention"

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "laguna": (
        "LagunaConfig",
        "LagunaForCausalLM",
        {
            "hidden_size": 48,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "intermediate_size": 48,
            "layer_types": [FULL, SLIDING, SLIDING, FULL],
            "num_attention_heads_per_layer": [4, 6, 2, 4],
            "sliding_window": 8,
            "rope_parameters": {
                FULL: {
                    "rope_type": "yarn",
                    "rope_theta": 5000.0,
                    "partial_rotary_factor": 0.5,
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                    "beta_fast": 4.0,
                },
                SLIDING: {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0},
            },
            "gating": "per-head",
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 32,
            "moe_routed_scaling_factor": 2.5,
            "moe_router_logit_softcapping": 3.0,
        },
    ),
    "laguna_per_element": (
        "LagunaConfig",
        "LagunaForCausalLM",
        {
            "num_hidden_layers": 2,
            "head_dim": 16,
            "intermediate_size": 48,
            "attention_bias": True,
            "gating": "per-element",
            "mlp_layer_types": ["sparse", "dense"],
            "num_experts": 4,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 32,
            "tie_word_embeddings": True,
        },
    ),
    "cohere2": (
        "Cohere2Config",
        "Cohere2ForCausalLM",
        {
            "num_hidden_layers": 4,
            "intermediate_size": 48,
            "layer_types": [SLIDING, FULL, SLIDING, FULL],
            "sliding_window": 8,
            "logit_scale": 0.25,
            "tie_word_embeddings": True,
        },
    ),
    "cohere2_moe": (
        "Cohere2MoeConfig",
        "Cohere2MoeForCausalLM",
        {
            "hidden_size": 48,
            "num_hidden_layers": 3,
            "head_dim": 24,
            "intermediate_size": 32,
            "prefix_dense_intermediate_size": 48,
            "first_k_dense_replace": 1,
            "sliding_window_pattern": 2,
            "sliding_window": 8,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "num_shared_experts": 2,
            "tie_word_embeddings": True,
        },
    ),
    "cohere2_moe_rms": (
        "Cohere2MoeConfig",
        "Cohere2MoeForCausalLM",
        {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "intermediate_size": 32,
            "layer_types": [SLIDING, FULL, SLIDING],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "prefix_dense_intermediate_size": 40,
            "prefix_dense_sliding_window_pattern": 4,
            "sliding_window": 8,
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_shared_experts": 1,
            "expert_selection_fn": "sigmoid",
            "shared_expert_combination_strategy": "sum",
            "rope_theta": 500.0,
        },
    ),
}
