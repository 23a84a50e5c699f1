"""Tiny configurations of Nemotron-H and gpt-oss for `make_goldens.py`, and gpt-oss's published form of its experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

NEMOTRON: dict[str, Any] = {
    "hidden_size": 48,
    "head_dim": 16,
    "mamba_num_heads": 6,
    "mamba_head_dim": 12,
    "ssm_state_size": 20,
    "n_groups": 2,
    # The library's prefill holds steps above this, its decoding does not, and real models have no such limit.
    "time_step_min": 1e-9,
    "chunk_size": 16,
}
GPT_OSS: dict[str, Any] = {
    "hidden_size": 48,
    "head_dim": 24,
    "intermediate_size": 24,
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "sliding_window": 8,
    "swiglu_limit": 0.8,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 5000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 3.0,
        "beta_slow": 0.5,
        "truncate": False,
    },
}
MAMBA, ATTENTION, MLP, MOE = "linear_attention", "full_attention", "mlp", "moe"

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "nemotron_h": (
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {**NEMOTRON, "layers_block_type": [MAMBA, MLP, ATTENTION, MAMBA], "use_bias": True, "mlp_bias": True},
    ),
    "nemotron_h_moe": (
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            **NEMOTRON,
            "layers_block_type": [MAMBA, MOE, ATTENTION, MOE],
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "routed_scaling_factor": 2.5,
        },
    ),
    "nemotron_h_latent": (
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            **NEMOTRON,
            "layers_block_type": [MOE, MAMBA, ATTENTION],
            "use_conv_bias": False,
            "conv_kernel": 3,
            "n_groups": 3,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 24,
            "moe_latent_size": 32,
            "tie_word_embeddings": False,
        },
    ),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", GPT_OSS),
    "gpt_oss_mxfp4": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            **GPT_OSS,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "intermediate_size": 96,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "swiglu_limit": 7.0,
        },
    ),
}

STEPS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def pack_experts(folder: Path) -> None:
    """Store the experts of a saved gpt-oss as its files have them: rows of codes in blocks of 32 and their exponents.

    Two codes a byte, the first in the low half; the rows of gate and up take turns, which is the order of the columns
    that they are made from.
    """
    path = folder / "model.safetensors"
    tensors: dict[str, torch.Tensor] = {}
    for name, value in load_file(path).items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = value
            continue
        rows = value.float().transpose(1, 2)
        groups = rows.reshape(*rows.shape[:2], -1, 32)
        exponents = torch.ceil(torch.log2(groups.abs().amax(-1) / 6))
        scaled = groups / torch.exp2(exponents)[..., None]
        codes = (scaled.abs()[..., None] - STEPS).abs().argmin(-1) + 8 * (scaled < 0)
        tensors[f"{name}_blocks"] = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
        tensors[f"{name}_scales"] = (exponents + 127).to(torch.uint8)
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))


def logits_of(folder: Path, ids: torch.Tensor) -> np.ndarray:
    """Float32 logits `[T, vocab]` of the packed model, by the reference's own decoding."""
    from transformers import GptOssForCausalLM, Mxfp4Config

    model = GptOssForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True), attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        logits: np.ndarray = model.float()(ids).logits[0].numpy().astype(np.float32)
    return logits
