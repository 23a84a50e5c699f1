"""Goldens of Nemotron-H and gpt-oss as GGUF files, by that format's conventions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from tests.helpers.gguf_files import Tensor, encode, gguf_bytes
from tests.helpers.memory_checkpoint import MemoryCheckpoint
from tests.model.test_gguf_models import SHARED_KEYS, numbers

TOP = {
    "backbone.embeddings": "token_embd",
    "backbone.norm_f": "output_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
NEMOTRON = {
    "norm": "attn_norm",
    "mixer.in_proj": "ssm_in",
    "mixer.conv1d": "ssm_conv1d",
    "mixer.A_log": "ssm_a",
    "mixer.D": "ssm_d",
    "mixer.dt_bias": "ssm_dt.bias",
    "mixer.norm": "ssm_norm",
    "mixer.out_proj": "ssm_out",
    "mixer.q_proj": "attn_q",
    "mixer.k_proj": "attn_k",
    "mixer.v_proj": "attn_v",
    "mixer.o_proj": "attn_output",
    "mixer.up_proj": "ffn_up",
    "mixer.down_proj": "ffn_down",
    "mixer.gate": "ffn_gate_inp",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mixer.experts.up_proj": "ffn_up_exps",
    "mixer.experts.down_proj": "ffn_down_exps",
    "mixer.shared_experts.up_proj": "ffn_up_shexp",
    "mixer.shared_experts.down_proj": "ffn_down_shexp",
    "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
}
GPT_OSS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.router": "ffn_gate_inp",
}
SUFFIXLESS = {"ssm_a", "ssm_d"}


def layer_name(name: str, modules: dict[str, str]) -> str:
    """`blk.N.…` of a tensor of a layer."""
    _, _, layer, rest = name.split(".", 3)
    if rest in modules:
        return f"blk.{layer}.{modules[rest]}"
    module, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{modules[module]}.{kind}"


def nemotron_tensors(folder: MemoryCheckpoint) -> dict[str, np.ndarray]:
    """Every tensor by the file's name: vectors of heads as columns, gains by groups, kernels without their middle."""
    groups = folder.config["n_groups"]
    tensors = {}
    for name, values in numbers(folder).items():
        if name.endswith("A_log"):
            values = -np.exp(values)[:, None]
        elif name.endswith("mixer.D"):
            values = values[:, None]
        elif name.endswith("conv1d.weight"):
            values = values[:, 0]
        elif name.endswith("mixer.norm.weight"):
            values = values.reshape(groups, -1)
        module, _, kind = name.rpartition(".")
        tensors[f"{TOP[module]}.{kind}" if module in TOP else layer_name(name, NEMOTRON)] = values
    return tensors


def nemotron_metadata(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    """The configuration as a file of this architecture says it."""
    kinds = config["layers_block_type"]
    wide = config["moe_intermediate_size"] if architecture.endswith("moe") else config["intermediate_size"]
    keys = {key: config[field] for key, field in SHARED_KEYS.items() if config.get(field) is not None}
    keys |= {
        "block_count": len(kinds),
        "attention.head_count_kv": [config["num_key_value_heads"] * (kind == "full_attention") for kind in kinds],
        "feed_forward_length": [wide * (kind in ("mlp", "moe")) for kind in kinds],
        "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.state_size": config["ssm_state_size"],
        "ssm.group_count": config["n_groups"],
        "ssm.time_step_rank": config["mamba_num_heads"],
        "ssm.inner_size": config["mamba_num_heads"] * config["mamba_head_dim"],
        "rope.scaling.finetuned": False,
    }
    if architecture.endswith("moe"):
        keys |= {
            "expert_count": config["n_routed_experts"],
            "expert_shared_count": config["n_shared_experts"],
            "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
            "expert_weights_norm": config["norm_topk_prob"],
            "expert_weights_scale": config["routed_scaling_factor"],
            "expert_group_count": config["n_group"],
            "expert_group_used_count": config["topk_group"],
        }
        if config.get("moe_latent_size"):
            keys["moe_latent_size"] = config["moe_latent_size"]
    else:
        keys = {key: value for key, value in keys.items() if not key.startswith("expert")}
    return {"general.architecture": architecture} | {f"{architecture}.{key}": v for key, v in keys.items()}


def mxfp4(blocks: np.ndarray, scales: np.ndarray) -> Tensor:
    """Published blocks of 32 codes as the file's: the exponent, then codes 0 to 15 in the low halves of its bytes."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
    packed = codes[..., :16] | codes[..., 16:] << 4
    raw = np.concatenate([scales[..., None], packed], axis=-1)
    return "MXFP4", np.ascontiguousarray(raw.reshape(*raw.shape[:2], -1))


def gpt_oss_tensors(folder: MemoryCheckpoint) -> dict[str, Tensor]:
    """Every tensor by the file's name, experts as they are in the folder: packed, or dense and then turned."""
    tensors: dict[str, Tensor] = {}
    arrays = {name: value for name, value in folder.tensors.items() if isinstance(value, mx.array)}
    for name, value in arrays.items():
        if ".experts." not in name:
            module, _, kind = name.rpartition(".")
            stored = f"{TOP[module]}.{kind}" if module in TOP else layer_name(name, GPT_OSS)
            tensors[stored] = encode("F32", np.array(value.astype(mx.float32)))
            continue
        layer, part = name.split(".")[2], name.rpartition(".")[2]
        halves = {"gate": slice(0, None, 2), "up": slice(1, None, 2)} if "gate_up" in part else {"down": slice(None)}
        for half, rows in halves.items():
            stored = f"blk.{layer}.ffn_{half}_exps"
            if part.endswith("_bias"):
                tensors[f"{stored}.bias"] = encode("F32", np.array(value.astype(mx.float32))[:, rows])
            elif part.endswith("_blocks"):
                scales = np.array(arrays[name.replace("_blocks", "_scales")])
                tensors[f"{stored}.weight"] = mxfp4(np.array(value)[:, rows], scales[:, rows])
            elif not part.endswith("_scales"):
                dense = np.array(value.astype(mx.float32)).swapaxes(1, 2)
                tensors[f"{stored}.weight"] = encode("F32", np.ascontiguousarray(dense[:, rows]))
    return tensors


def gpt_oss_metadata(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration as a file says it."""
    keys = {key: config[field] for key, field in SHARED_KEYS.items() if config.get(field) is not None}
    rope = config["rope_parameters"]
    keys |= {
        "expert_feed_forward_length": config["intermediate_size"],
        "rope.dimension_count": config["head_dim"],
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(rope["factor"]),
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        "rope.scaling.yarn_beta_fast": float(rope.get("beta_fast", 32.0)),
        "rope.scaling.yarn_beta_slow": float(rope.get("beta_slow", 1.0)),
    }
    return {"general.architecture": "gpt-oss"} | {f"gpt-oss.{key}": v for key, v in keys.items()}


def library_tensors(folder: MemoryCheckpoint) -> dict[str, Tensor]:
    """Packed experts as Ollama's library has them: gate and up by turns, blocks as published, q, k and v in one."""
    arrays = {
        name: np.array(value.astype(mx.float32)) if value.dtype == mx.bfloat16 else np.array(value)
        for name, value in folder.tensors.items()
        if isinstance(value, mx.array)
    }
    tensors: dict[str, Tensor] = {}
    for name, (kind, raw) in gpt_oss_tensors(folder).items():
        if "_exps" in name or "attn_k" in name or "attn_v" in name:
            continue
        stored = name.replace("attn_sinks.weight", "attn_sinks").replace("attn_output", "attn_out")
        stored = stored.replace("post_attention_norm", "ffn_norm")
        if ".attn_q." in name:
            layer, suffix = name.split(".")[1], name.rpartition(".")[2]
            parts = [arrays[f"model.layers.{layer}.self_attn.{part}_proj.{suffix}"] for part in "qkv"]
            tensors[f"blk.{layer}.attn_qkv.{suffix}"] = encode("F32", np.concatenate(parts))
            continue
        tensors[stored] = kind, raw
    for name, blocks in arrays.items():
        if not name.endswith("_blocks"):
            continue
        stem = name.removesuffix("_blocks")
        raw = np.concatenate([arrays[f"{stem}_scales"][..., None], blocks], axis=-1)
        stored = layer_name(
            f"{stem}.weight", {"mlp.experts.gate_up_proj": "ffn_gate_up_exps", "mlp.experts.down_proj": "ffn_down_exps"}
        )
        tensors[stored] = "MXFP4_PAIRS", np.ascontiguousarray(raw.reshape(*raw.shape[:2], -1))
        tensors[stored.replace(".weight", ".bias")] = encode("F32", arrays[f"{stem}_bias"])
    return tensors


def library_metadata(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration as those files say it: no type of scaling, the experts' width as that of the network."""
    known = gpt_oss_metadata(config)
    dropped = ("rope.scaling.type", "rope.scaling.yarn", "rope.dimension_count", "expert_feed_forward_length")
    keys = {key.removeprefix("gpt-oss."): value for key, value in known.items() if key.startswith("gpt-oss.")}
    keys = {key: value for key, value in keys.items() if not key.startswith(dropped)}
    return {"general.architecture": "gptoss"} | {f"gptoss.{key}": value for key, value in keys.items()}


def write_nemotron(path: Path, folder: MemoryCheckpoint, architecture: str, more: dict[str, Any] | None = None) -> None:
    """A golden as a file of float32 numbers; `more` are keys of the architecture."""
    keys = nemotron_metadata(folder.config, architecture) | {f"{architecture}.{k}": v for k, v in (more or {}).items()}
    path.write_bytes(gguf_bytes(keys, {name: encode("F32", v) for name, v in nemotron_tensors(folder).items()}))


def write_gpt_oss(path: Path, folder: MemoryCheckpoint, more: dict[str, Any] | None = None) -> None:
    """A golden as a file; `more` are keys of the architecture."""
    keys = gpt_oss_metadata(folder.config) | {f"gpt-oss.{k}": v for k, v in (more or {}).items()}
    path.write_bytes(gguf_bytes(keys, gpt_oss_tensors(folder)))
