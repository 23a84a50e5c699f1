"""Latent attention with random weights, and DeepSeek checkpoints at sizes of one's own."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from arriero.model.layers.mla import LatentAttention, LatentConfig
from arriero.model.layers.rope import Rope, RopeConfig
from arriero.model.weight import Weight
from tests.helpers.memory_checkpoint import MemoryCheckpoint

SMALL = LatentConfig(hidden=40, heads=3, query_rank=24, rank=32, nope=16, rotated=8, value=12, scale=0.2, bias=False)


def matrices(config: LatentConfig, seed: int = 0) -> dict[str, mx.array | Weight]:
    """Float32 tensors of one layer, under `a`."""
    c, rng = config, np.random.default_rng(seed)
    heads = c.heads * (c.nope + c.rotated)
    shapes = {
        "kv_a_proj_with_mqa": (c.width, c.hidden),
        "kv_b_proj": (c.heads * (c.nope + c.value), c.rank),
        "o_proj": (c.hidden, c.heads * c.value),
    }
    if c.query_rank is None:
        shapes["q_proj"] = (heads, c.hidden)
    else:
        shapes |= {"q_a_proj": (c.query_rank, c.hidden), "q_b_proj": (heads, c.query_rank)}
    found: dict[str, mx.array | Weight] = {
        f"a.{name}.weight": mx.array(rng.normal(0, shape[1] ** -0.5, shape).astype(np.float32))
        for name, shape in shapes.items()
    }
    norms = {"kv_a_layernorm": c.rank} | ({} if c.query_rank is None else {"q_a_layernorm": c.query_rank})
    for name, width in norms.items():
        found[f"a.{name}.weight"] = mx.array(rng.normal(1, 0.2, width).astype(np.float32))
    return found


def layer(
    config: LatentConfig, tensors: dict[str, mx.array | Weight] | None = None, dtype: mx.Dtype = mx.float32
) -> LatentAttention:
    """The layer of these tensors (default: random ones)."""
    rope = Rope(RopeConfig(10000.0), config.rotated, interleaved=True)
    held = MemoryCheckpoint({}, matrices(config) if tensors is None else tensors)
    return LatentAttention.load(held.typed(), "a", dtype, config, rope)


def plainly(config: LatentConfig, tensors: dict[str, mx.array | Weight], x: np.ndarray) -> np.ndarray:
    """What a prompt x `[T, hidden]` gives, float64, every head's keys and values made first."""
    c, count = config, len(x)
    held = {name[2:-7]: np.array(value, np.float64) for name, value in tensors.items()}

    def norm(values: np.ndarray, name: str) -> np.ndarray:
        root = np.sqrt((values**2).mean(-1, keepdims=True) + 1e-6)
        return np.asarray(values / root * held[name])

    def rotate(values: np.ndarray) -> np.ndarray:
        """Pairs of neighbours, `[T, heads, rotated]`."""
        angles = np.arange(count)[:, None] / 10000.0 ** (np.arange(0, c.rotated, 2) / c.rotated)
        turned = (values[..., ::2] + 1j * values[..., 1::2]) * np.exp(1j * angles)[:, None]
        return np.stack([turned.real, turned.imag], -1).reshape(values.shape)

    if c.query_rank is None:
        q = x @ held["q_proj"].T
    else:
        q = norm(x @ held["q_a_proj"].T, "q_a_layernorm") @ held["q_b_proj"].T
    q = q.reshape(count, c.heads, -1)
    latent, shared = np.split(x @ held["kv_a_proj_with_mqa"].T, [c.rank], axis=1)
    both = (norm(latent, "kv_a_layernorm") @ held["kv_b_proj"].T).reshape(count, c.heads, -1)
    k, v = np.split(both, [c.nope], axis=2)
    k = np.concatenate([k, np.broadcast_to(rotate(shared[:, None]), (count, c.heads, c.rotated))], axis=2)
    q = np.concatenate([q[..., : c.nope], rotate(q[..., c.nope :])], axis=2)
    scores = np.einsum("qhd,khd->hqk", q, k) * c.scale
    scores[:, np.triu(np.ones((count, count), bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    y = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)
    return np.asarray(y.reshape(count, -1) @ held["o_proj"].T)


PUBLISHED: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 150,
    "hidden_size": 144,
    "intermediate_size": 136,
    "moe_intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "q_lora_rank": 130,
    "kv_lora_rank": 136,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "hidden_act": "silu",
    "attention_bias": False,
    "ep_size": 1,
    "max_position_embeddings": 160,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 40,
    },
    "tie_word_embeddings": False,
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    },
}
"""DeepSeek-V3's published fields at small sizes, none of which is a multiple of 128."""


def published_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Float32 tensors by DeepSeek-V3's published names, the layer that predicts a second token included."""
    c, rng = PUBLISHED, np.random.default_rng(seed)
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    width = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
    attention = {
        "q_a_proj": (c["q_lora_rank"], hidden),
        "q_b_proj": (heads * width, c["q_lora_rank"]),
        "kv_a_proj_with_mqa": (c["kv_lora_rank"] + c["qk_rope_head_dim"], hidden),
        "kv_b_proj": (heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), c["kv_lora_rank"]),
        "o_proj": (hidden, heads * c["v_head_dim"]),
    }

    def gated(width: int) -> dict[str, tuple[int, int]]:
        return {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}

    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (c["vocab_size"], hidden), "norm": (hidden,)}
    for index in range(3):
        stem = f"layers.{index}"
        shapes |= {f"{stem}.{norm}_layernorm": (hidden,) for norm in ("input", "post_attention")}
        shapes |= {f"{stem}.self_attn.{name}": shape for name, shape in attention.items()}
        shapes |= {f"{stem}.self_attn.{kind}_a_layernorm": (c[f"{kind}_lora_rank"],) for kind in ("q", "kv")}
        parts = {"": gated(c["intermediate_size"])}
        if index:
            parts = {f"experts.{expert}.": gated(40) for expert in range(4)} | {"shared_experts.": gated(40)}
            shapes |= {f"{stem}.mlp.gate": (4, hidden)}
        shapes |= {f"{stem}.mlp.{part}{name}": shape for part, found in parts.items() for name, shape in found.items()}
    shapes |= {"layers.2.eh_proj": (hidden, 2 * hidden), "layers.2.embed_tokens": (c["vocab_size"], hidden)}
    shapes |= {f"layers.2.{name}": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
    shapes |= {"layers.2.shared_head.head": (c["vocab_size"], hidden)}
    found = {f"model.{name}.weight": _draw(rng, shape) for name, shape in shapes.items()}
    found["lm_head.weight"] = _draw(rng, (c["vocab_size"], hidden))
    for index in (1, 2):
        found[f"model.layers.{index}.mlp.gate.e_score_correction_bias"] = _draw(rng, (4,)) - 1
    return found


def _draw(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    if len(shape) == 1:
        return rng.normal(1, 0.2, shape).astype(np.float32)
    return rng.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)
