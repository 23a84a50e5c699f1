"""Checkpoints with the tests' layers at the widths of real models and random weights, to measure with.

    python tools/make_wide.py FOLDER [NAME ...]

Needs torch and transformers. Kinds and order of layers are those of `tools/make_goldens.py`; a mixture has 16 experts,
which is enough to choose from and small enough to write. Half a gigabyte each.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools import golden_hybrids, golden_models, make_goldens

BASE: dict[str, Any] = {
    "vocab_size": 32768,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 4096,
}
WINDOW = {"sliding_window": 512}
MOE: dict[str, Any] = {**BASE, "num_experts": 16, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
ROUTED: dict[str, Any] = {**BASE, "n_routed_experts": 16, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
LATENT: dict[str, Any] = {
    **ROUTED,
    "num_key_value_heads": 16,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "head_dim": 64,
}
DELTA: dict[str, Any] = {
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
}
GEMMA4: dict[str, Any] = {
    **BASE,
    **WINDOW,
    "num_attention_heads": 8,
    "head_dim": 256,
    "global_head_dim": 512,
    "vocab_size_per_layer_input": 32768,
}
MAMBA: dict[str, Any] = {
    **BASE,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "moe_shared_expert_intermediate_size": 1536,
}
WIDE: dict[str, dict[str, Any]] = {
    "llama": BASE,
    "qwen2": BASE,
    "qwen3": BASE,
    "qwen3_moe": MOE,
    "qwen3_5": {**BASE, **DELTA},
    "qwen3_5_moe": {**MOE, **DELTA, "shared_expert_intermediate_size": 768},
    "qwen4_exp": {
        **MOE,
        **DELTA,
        "shared_expert_intermediate_size": 768,
        "hc_lowrank": 320,
        "ple_embed_dim": 2048,
        "heads_per_ngram": 8,
        "ngram_vocab_size_base": 4096,
        "indexer_n_heads": 4,
        "indexer_head_dim": 128,
        "indexer_budget": 512,
    },
    "gemma2": {**BASE, **WINDOW},
    "gemma3": {**BASE, **WINDOW},
    "gemma4_e2b": {**GEMMA4, "hidden_size": 1536, "num_key_value_heads": 1, "hidden_size_per_layer_input": 256},
    "gemma4_31b": {**GEMMA4, "num_global_key_value_heads": 1},
    "gemma4_26b_a4b": {
        **GEMMA4,
        "num_global_key_value_heads": 1,
        "num_experts": 16,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
    },
    "deepseek_v3": LATENT,
    "glm4_moe": ROUTED,
    "glm4_moe_lite": LATENT,
    "laguna": {
        **MOE,
        **WINDOW,
        "num_attention_heads_per_layer": [16, 24, 24, 16],
        "shared_expert_intermediate_size": 768,
    },
    "cohere2": {**BASE, **WINDOW},
    "cohere2_moe": {**MOE, **WINDOW, "intermediate_size": 768, "prefix_dense_intermediate_size": 6144},
    "nemotron_h": MAMBA,
    "nemotron_h_moe": {**MAMBA, **{k: v for k, v in ROUTED.items() if k not in BASE}},
    "gpt_oss_mxfp4": {**BASE, **WINDOW, "head_dim": 64, "intermediate_size": 768, "num_local_experts": 16},
}
"""Fields over those of the tests, by the tests' name."""


def make(name: str, folder: Path) -> None:
    """Write `config.json` and `model.safetensors`."""
    config_class, model_class, fields = golden_models.MODELS[name]
    config = getattr(transformers, config_class)(**{**make_goldens.SHAPE, **fields, **WIDE[name]})
    torch.set_default_dtype(torch.bfloat16)
    model = getattr(transformers, model_class)(config)
    make_goldens.randomise(model, 0)
    model.save_pretrained(folder, safe_serialization=True)
    if name.endswith("mxfp4"):
        torch.set_default_dtype(torch.float32)
        golden_hybrids.pack_experts(folder)


def main(arguments: list[str]) -> None:
    if not arguments:
        raise SystemExit(__doc__)
    for name in arguments[1:] or WIDE:
        make(name, Path(arguments[0]) / name)
        print(name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
