"""Published configurations, the tensors that they mean, and the bytes that a decode step has to read of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from arriero.model.quantization import Quantization

Shape = tuple[int, ...]

_QWEN3 = {
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "head_dim": 128,
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
}
_QWEN3_5 = {
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "head_dim": 256,
    "full_attention_interval": 4,
    "attn_output_gate": True,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": False,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3-8B": _QWEN3
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
    },
    "Qwen3-30B-A3B": _QWEN3
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
    },
    "Qwen3.5-35B-A3B": _QWEN3_5
    | {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 2048,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 32,
    },
    "Qwen3.8-27B": _QWEN3_5
    | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 48,
    },
    "Gemma-4-31B": {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "vocab_size": 262144,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "attention_k_eq_v": True,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
}
"""By their names: what `config.json` says of the text network."""


def tensors(config: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    """Names and shapes of a configuration's tensors, as files for MLX have them."""
    c = config
    hidden, vocab = c["hidden_size"], c["vocab_size"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    yield "model.norm.weight", (hidden,)
    if not c["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)
    gemma = c["model_type"].startswith("gemma")
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        full = is_full(c, layer)
        yield f"{at}.input_layernorm.weight", (hidden,)
        yield f"{at}.post_attention_layernorm.weight", (hidden,)
        if gemma:
            yield f"{at}.pre_feedforward_layernorm.weight", (hidden,)
            yield f"{at}.post_feedforward_layernorm.weight", (hidden,)
            yield f"{at}.layer_scalar", (1,)
        if full or gemma or "full_attention_interval" not in c:
            yield from _attention(c, f"{at}.self_attn", wide=full and gemma)
        else:
            yield from _delta_net(c, f"{at}.linear_attn")
        if "num_experts" in c:
            yield from _experts(c, f"{at}.mlp")
        else:
            yield from _mlp(f"{at}.mlp", hidden, c["intermediate_size"])


def is_full(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer's attention sees everything: every one's, every fourth's or every sixth's."""
    every = config.get("full_attention_interval", config.get("sliding_window_pattern", 1))
    return bool((layer + 1) % every == 0)


def _attention(c: Mapping[str, Any], at: str, *, wide: bool) -> Iterator[tuple[str, Shape]]:
    hidden = c["hidden_size"]
    dim = c["global_head_dim"] if wide else c["head_dim"]
    keys = (c["num_global_key_value_heads"] if wide else c["num_key_value_heads"]) * dim
    queries = c["num_attention_heads"] * dim
    yield f"{at}.q_proj.weight", (queries * (2 if c.get("attn_output_gate") else 1), hidden)
    yield f"{at}.k_proj.weight", (keys, hidden)
    if not (wide and c["attention_k_eq_v"]):
        yield f"{at}.v_proj.weight", (keys, hidden)
    yield f"{at}.o_proj.weight", (hidden, queries)
    yield f"{at}.q_norm.weight", (dim,)
    yield f"{at}.k_norm.weight", (dim,)


def _delta_net(c: Mapping[str, Any], at: str) -> Iterator[tuple[str, Shape]]:
    hidden, heads = c["hidden_size"], c["linear_num_value_heads"]
    values = heads * c["linear_value_head_dim"]
    channels = 2 * c["linear_num_key_heads"] * c["linear_key_head_dim"] + values
    yield f"{at}.in_proj_qkv.weight", (channels, hidden)
    yield f"{at}.in_proj_z.weight", (values, hidden)
    yield f"{at}.in_proj_b.weight", (heads, hidden)
    yield f"{at}.in_proj_a.weight", (heads, hidden)
    yield f"{at}.out_proj.weight", (hidden, values)
    yield f"{at}.conv1d.weight", (channels, c["linear_conv_kernel_dim"], 1)
    yield f"{at}.A_log", (heads,)
    yield f"{at}.dt_bias", (heads,)
    yield f"{at}.norm.weight", (c["linear_value_head_dim"],)


def _mlp(at: str, hidden: int, inner: int) -> Iterator[tuple[str, Shape]]:
    yield f"{at}.gate_proj.weight", (inner, hidden)
    yield f"{at}.up_proj.weight", (inner, hidden)
    yield f"{at}.down_proj.weight", (hidden, inner)


def _experts(c: Mapping[str, Any], at: str) -> Iterator[tuple[str, Shape]]:
    hidden, inner, count = c["hidden_size"], c["moe_intermediate_size"], c["num_experts"]
    yield f"{at}.gate.weight", (count, hidden)
    for name, shape in _mlp(f"{at}.switch_mlp", hidden, inner):
        yield name, (count, *shape)
    if "shared_expert_intermediate_size" in c:
        yield from _mlp(f"{at}.shared_expert", hidden, c["shared_expert_intermediate_size"])
        yield f"{at}.shared_expert_gate.weight", (1, hidden)


def packing(name: str, shape: Shape, config: Mapping[str, Any], how: Quantization | None) -> Quantization | None:
    """What a tensor is packed as; None: bfloat16, as routers, vectors, kernels and tables that are no heads are.

    A table that is the head too has eight bits a number, as `arriero create` packs it.
    """
    if how is None or len(shape) == 1 or name.endswith(("conv1d.weight", ".mlp.gate.weight")) or shape[-2] < 128:
        return None
    if name.endswith("embed_tokens.weight"):
        return Quantization("mxfp8", 8, 32) if config["tie_word_embeddings"] else None
    return how


def tensor_bytes(shape: Shape, how: Quantization | None) -> float:
    """Of the codes and scales; numbers of dense tensors take two bytes."""
    count = 1
    for size in shape:
        count *= size
    if how is None:
        return 2 * count
    scale = 4 if how.mode == "affine" else 1
    return count * how.bits / 8 + count / how.group_size * scale


def step_bytes(
    config: Mapping[str, Any], how: Quantization | None, *, rows: int, context: int, tokens: int = 1
) -> float:
    """Bytes that a step of `tokens` tokens for each of `rows` has to read, or write, with `context` tokens held.

    All matrices once, of experts as many as that many tokens are expected to choose; keys and values; states twice, as
    they are written too. Activations are left out.
    """
    c = config
    total = 0.0
    for name, shape in tensors(c):
        if name.endswith("embed_tokens.weight") and not c["tie_word_embeddings"]:
            continue
        size = tensor_bytes(shape, packing(name, shape, c, how))
        if ".switch_mlp." in name:
            size *= 1 - (1 - c["num_experts_per_tok"] / c["num_experts"]) ** (rows * tokens)
        total += size
    return total + rows * cache_bytes(c, context)


def cache_bytes(config: Mapping[str, Any], context: int) -> float:
    """Bytes that a step reads and writes of one row's caches and states."""
    c = config
    total = 0.0
    for layer in range(c["num_hidden_layers"]):
        full = is_full(c, layer)
        if full or "full_attention_interval" not in c:
            wide = full and "global_head_dim" in c
            heads = c["num_global_key_value_heads"] if wide else c["num_key_value_heads"]
            dim = c["global_head_dim"] if wide else c["head_dim"]
            held = context if full else min(context, c["sliding_window"])
            total += 2 * heads * dim * held * 2
        else:
            values = c["linear_num_value_heads"] * c["linear_value_head_dim"]
            channels = 2 * c["linear_num_key_heads"] * c["linear_key_head_dim"] + values
            total += 2 * (4 * values * c["linear_key_head_dim"] + 2 * channels * (c["linear_conv_kernel_dim"] - 1))
    return total
