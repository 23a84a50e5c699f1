"""Tiny configurations of the golden models: unequal sizes wherever two could be mixed up, every factor away from 1."""

from __future__ import annotations

from typing import Any

from tools import golden_hybrids, golden_windowed
from tools.golden_windowed import FULL, SLIDING

SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MOE: dict[str, Any] = {
    "num_hidden_layers": 2,
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
}
GEMMA: dict[str, Any] = {
    "head_dim": 16,
    "intermediate_size": 64,
    "sliding_window": 8,
    "query_pre_attn_scalar": 24,
    "tie_word_embeddings": True,
}
THETA = 10000.0

FIRST = (
    "gemma2 gemma3 llama llama_linear_biases llama_llama3_tied llama_yarn mistral_window qwen2 qwen2_window qwen3 "
    "qwen3_moe qwen3_moe_mixed qwen3_yarn"
).split()
"""Models whose seeds are their places here; a later name is its own seed, so that adding one changes no other."""

QWEN35: dict[str, Any] = {
    "hidden_size": 48,
    "head_dim": 16,
    "intermediate_size": 64,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": THETA,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
QWEN35_MOE: dict[str, Any] = {
    **QWEN35,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_experts": 4,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
GEMMA4: dict[str, Any] = {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "intermediate_size": 64,
    "sliding_window": 8,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 128,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}
QWEN4: dict[str, Any] = {
    **QWEN35,
    "hidden_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "hc_count": 4,
    "hc_lowrank": 8,
    "ple_layer_ids": [2],
    "ple_embed_dim": 64,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 64,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 4,
    # Six heads: with fewer, blocks that score exactly nothing are frequent, and equal ones have no order.
    "indexer_n_heads": 6,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "output_gate_type": "sigmoid",
    # Stands twice in the ids, at 11 and 20: it ends the context of n-grams.
    "eos_token_id": 43,
}

ROUTED: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
}
LATENT: dict[str, Any] = {
    **ROUTED,
    "hidden_size": 48,
    "num_key_value_heads": 4,
    "intermediate_size": 64,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
SEEDS = {
    "deepseek_v2": 44,
    "deepseek_v3": 14,
    "deepseek_v3_halves": 30,
    "glm4_moe": 12,
    "glm4_moe_plain": 51,
    "glm4_moe_lite": 53,
}
"""Draws, out of the first 60, whose choices of experts keep away from ties, which 16 bits would turn over."""


def yarn(mscale: float, mscale_all_dim: float) -> dict[str, Any]:
    """DeepSeek's rotary parameters, by which a window of 16 tokens becomes one of 64."""
    return {
        "rope_type": "yarn",
        "rope_theta": THETA,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 4.0,
        "mscale": mscale,
        "mscale_all_dim": mscale_all_dim,
    }


# name: (configuration class, model class, fields)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            **GEMMA,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "rope_theta": THETA, "factor": 8.0},
            },
        },
    ),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"rms_norm_eps": 1e-5}),
    "llama_linear_biases": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": THETA, "factor": 4.0},
        },
    ),
    "llama_llama3_tied": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": THETA,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "llama_yarn": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": THETA,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 4.0,
            },
        },
    ),
    "mistral_window": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 8, "head_dim": 24}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen2_window": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 24, "tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**MOE, "norm_topk_prob": True}),
    "qwen3_moe_mixed": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {**MOE, "norm_topk_prob": False, "mlp_only_layers": [1]},
    ),
    "qwen3_yarn": (
        "Qwen3Config",
        "Qwen3ForCausalLM",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", QWEN35),
    "qwen3_5_tied": (
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        {
            **QWEN35,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_conv_kernel_dim": 3,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", QWEN35_MOE),
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            **QWEN35_MOE,
            "mlp_only_layers": [0],
            "rope_parameters": {"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": 0.25},
        },
    ),
    "gemma4_e2b": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {
            **GEMMA4,
            "num_key_value_heads": 1,
            "intermediate_size": 24,
            "num_hidden_layers": 6,
            "layer_types": [SLIDING, FULL, SLIDING, SLIDING, SLIDING, FULL],
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 16,
        },
    ),
    "gemma4_31b": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {
            **GEMMA4,
            "num_attention_heads": 4,
            "layer_types": [SLIDING, SLIDING, FULL],
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
    ),
    "gemma4_26b_a4b": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {
            **GEMMA4,
            "num_hidden_layers": 2,
            "layer_types": [SLIDING, FULL],
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 3,
            "moe_intermediate_size": 32,
        },
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {
            **LATENT,
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "rope_parameters": yarn(0.707, 0.707),
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            **LATENT,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "rope_parameters": yarn(0.7, 1.2),
        },
    ),
    "deepseek_v3_halves": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            **LATENT,
            "num_hidden_layers": 2,
            "first_k_dense_replace": 0,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "attention_bias": True,
            "rope_interleave": False,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
        },
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        {**ROUTED, "hidden_size": 48, "head_dim": 24, "attention_bias": True, "use_qk_norm": True},
    ),
    "glm4_moe_plain": (
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        {
            **ROUTED,
            "hidden_size": 48,
            "num_hidden_layers": 2,
            "head_dim": 16,
            "first_k_dense_replace": 0,
            "n_shared_experts": 2,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 1.5,
            "rope_parameters": {"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": 0.25},
        },
    ),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        "Glm4MoeLiteForCausalLM",
        {**LATENT, "mlp_layer_types": ["sparse", "dense", "sparse"], "rope_parameters": {"rope_theta": 1e6}},
    ),
    "qwen4_exp": ("Qwen4ExpTextConfig", "Qwen4ExpForCausalLM", QWEN4),
    "qwen4_exp_two_tables": (
        "Qwen4ExpTextConfig",
        "Qwen4ExpForCausalLM",
        {
            **QWEN4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "hc_count": 2,
            "ple_layer_ids": [1, 3],
            "ngram_size": 4,
            "ple_embed_dim": 96,
            "ple_conv_kernel_size": 3,
            "ngram_vocab_size_base": 32,
            "output_gate_type": None,
            "eos_token_id": 12,
        },
    ),
    **golden_windowed.MODELS,
    **golden_hybrids.MODELS,
    "granite": (
        "GraniteConfig",
        "GraniteForCausalLM",
        {
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "logits_scaling": 2.0,
        },
    ),
    # Past the length that it was trained for, two layers of attention, an odd block, and a shared table of angles.
    "qwen4_exp_yarn": (
        "Qwen4ExpTextConfig",
        "Qwen4ExpForCausalLM",
        {
            **QWEN4,
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
            "indexer_budget": 9,
            "indexer_compress_ratio": 3,
            "rope_parameters": {
                **QWEN35["rope_parameters"],
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
}
