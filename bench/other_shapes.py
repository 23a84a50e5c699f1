"""Published shapes of other architectures than `arriero bench gpu` measures, for counts of launches and single runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from arriero.bench.gpu_models import RandomCheckpoint
from arriero.bench.gpu_shapes import Shape, tensor_bytes
from arriero.model.quantization import Quantization
from arriero.model.stored import TensorInfo

MXFP4 = Quantization("mxfp4", 4, 32)
NVFP4 = Quantization("nvfp4", 4, 16)

GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
GLM: dict[str, Any] = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "first_k_dense_replace": 1,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "vocab_size": 154880,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
OTHERS = {"gpt-oss-20b": GPT_OSS, "GLM-4.7-Flash": GLM}


class OtherCheckpoint(RandomCheckpoint):
    """Random tensors of one of these configurations, each in the format that it is published or packed in."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config, None, tensors(config))

    def info(self, name: str) -> TensorInfo:
        found = super().info(name)
        how = packing(name, found.shape, self.config)
        return (
            found if how is None else TensorInfo(name, "U32", found.shape, how, round(tensor_bytes(found.shape, how)))
        )


def packing(name: str, shape: Shape, config: Mapping[str, Any]) -> Quantization | None:
    """gpt-oss has experts in MXFP4 and all else in bfloat16; the other is packed to NVFP4 but for router and table."""
    if len(shape) == 1 or name.endswith((".bias", ".mlp.gate.weight", "embed_tokens.weight")):
        return None
    if config["model_type"] == "gpt_oss":
        return MXFP4 if ".experts." in name else None
    return NVFP4


def tensors(config: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    """Names and shapes."""
    c, hidden = config, config["hidden_size"]
    yield "model.embed_tokens.weight", (c["vocab_size"], hidden)
    yield "lm_head.weight", (c["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", (hidden,)
        yield f"{at}.post_attention_layernorm.weight", (hidden,)
        yield from _latent(c, at, layer) if "kv_lora_rank" in c else _gpt_oss(c, at)


def _gpt_oss(c: Mapping[str, Any], at: str) -> Iterator[tuple[str, Shape]]:
    hidden, inner, experts = c["hidden_size"], c["intermediate_size"], c["num_local_experts"]
    queries, keys = (c[f"num_{name}_heads"] * c["head_dim"] for name in ("attention", "key_value"))
    for name, rows in (("q", queries), ("k", keys), ("v", keys)):
        yield f"{at}.self_attn.{name}_proj.weight", (rows, hidden)
        yield f"{at}.self_attn.{name}_proj.bias", (rows,)
    yield f"{at}.self_attn.o_proj.weight", (hidden, queries)
    yield f"{at}.self_attn.o_proj.bias", (hidden,)
    yield f"{at}.self_attn.sinks", (c["num_attention_heads"],)
    yield f"{at}.mlp.router.weight", (experts, hidden)
    yield f"{at}.mlp.router.bias", (experts,)
    yield f"{at}.mlp.experts.gate_up_proj.weight", (experts, 2 * inner, hidden)
    yield f"{at}.mlp.experts.gate_up_proj.bias", (experts, 2 * inner)
    yield f"{at}.mlp.experts.down_proj.weight", (experts, hidden, inner)
    yield f"{at}.mlp.experts.down_proj.bias", (experts, hidden)


def _latent(c: Mapping[str, Any], at: str, layer: int) -> Iterator[tuple[str, Shape]]:
    hidden, heads, rank, rotated = (
        c[k] for k in ("hidden_size", "num_attention_heads", "kv_lora_rank", "qk_rope_head_dim")
    )
    nope, value, query_rank = (c[k] for k in ("qk_nope_head_dim", "v_head_dim", "q_lora_rank"))
    yield f"{at}.self_attn.q_a_proj.weight", (query_rank, hidden)
    yield f"{at}.self_attn.q_a_layernorm.weight", (query_rank,)
    yield f"{at}.self_attn.q_b_proj.weight", (heads * (nope + rotated), query_rank)
    yield f"{at}.self_attn.kv_a_proj_with_mqa.weight", (rank + rotated, hidden)
    yield f"{at}.self_attn.kv_a_layernorm.weight", (rank,)
    yield f"{at}.self_attn.kv_b_proj.weight", (heads * (nope + value), rank)
    yield f"{at}.self_attn.o_proj.weight", (hidden, heads * value)
    if layer < c["first_k_dense_replace"]:
        yield from _mlp(f"{at}.mlp", hidden, c["intermediate_size"])
        return
    experts, inner = c["n_routed_experts"], c["moe_intermediate_size"]
    yield f"{at}.mlp.gate.weight", (experts, hidden)
    yield f"{at}.mlp.gate.e_score_correction_bias", (experts,)
    yield from _mlp(f"{at}.mlp.switch_mlp", hidden, inner, experts)
    yield from _mlp(f"{at}.mlp.shared_experts", hidden, inner * c["n_shared_experts"])


def _mlp(at: str, hidden: int, inner: int, *outer: int) -> Iterator[tuple[str, Shape]]:
    yield f"{at}.gate_proj.weight", (*outer, inner, hidden)
    yield f"{at}.up_proj.weight", (*outer, inner, hidden)
    yield f"{at}.down_proj.weight", (*outer, hidden, inner)
