"""Small models of architectures that `random_model` has no shapes of, with widths that the GPU's kernels take."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from arriero.model.architectures import load_model
from arriero.model.quantization import Quantization
from arriero.model.weight import Weight
from tests.helpers.memory_checkpoint import MemoryCheckpoint, quantize

MXFP4 = Quantization("mxfp4", 4, 32)


def gpt_oss(vocab: int = 64) -> Any:
    """One layer with a window and one without; rows of 160 numbers, which are no whole units."""
    hidden, inner, experts, heads, kv_heads, dim = 160, 96, 5, 4, 2, 64
    config = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "num_local_experts": experts,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(2):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.{name}layernorm.weight": (hidden,) for name in ("input_", "post_attention_")}
        for name, rows in (("q", heads * dim), ("k", kv_heads * dim), ("v", kv_heads * dim)):
            shapes |= {
                f"{at}.self_attn.{name}_proj.weight": (rows, hidden),
                f"{at}.self_attn.{name}_proj.bias": (rows,),
            }
        shapes |= {
            f"{at}.self_attn.o_proj.weight": (hidden, heads * dim),
            f"{at}.self_attn.o_proj.bias": (hidden,),
            f"{at}.self_attn.sinks": (heads,),
            f"{at}.mlp.router.weight": (experts, hidden),
            f"{at}.mlp.router.bias": (experts,),
            f"{at}.mlp.experts.gate_up_proj.weight": (experts, 2 * inner, hidden),
            f"{at}.mlp.experts.gate_up_proj.bias": (experts, 2 * inner),
            f"{at}.mlp.experts.down_proj.weight": (experts, hidden, inner),
            f"{at}.mlp.experts.down_proj.bias": (experts, hidden),
        }
    return _loaded(config, shapes, MXFP4, ".experts.")


def latent(vocab: int = 64) -> Any:
    """DeepSeek's attention with a latent of 256, dense matrices but for those of a layer with experts."""
    hidden, heads, rank, rotated, nope, value, query_rank, inner, experts = 128, 3, 256, 32, 32, 32, 64, 128, 4
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "moe_intermediate_size": inner,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "q_lora_rank": query_rank,
        "kv_lora_rank": rank,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": nope,
        "v_head_dim": value,
        "first_k_dense_replace": 1,
        "n_routed_experts": experts,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }

    def mlp(at: str, *outer: int) -> dict[str, tuple[int, ...]]:
        return {
            f"{at}.gate_proj.weight": (*outer, inner, hidden),
            f"{at}.up_proj.weight": (*outer, inner, hidden),
            f"{at}.down_proj.weight": (*outer, hidden, inner),
        }

    for layer in range(2):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.{name}layernorm.weight": (hidden,) for name in ("input_", "post_attention_")}
        shapes |= {
            f"{at}.self_attn.q_a_proj.weight": (query_rank, hidden),
            f"{at}.self_attn.q_a_layernorm.weight": (query_rank,),
            f"{at}.self_attn.q_b_proj.weight": (heads * (nope + rotated), query_rank),
            f"{at}.self_attn.kv_a_proj_with_mqa.weight": (rank + rotated, hidden),
            f"{at}.self_attn.kv_a_layernorm.weight": (rank,),
            f"{at}.self_attn.kv_b_proj.weight": (heads * (nope + value), rank),
            f"{at}.self_attn.o_proj.weight": (hidden, heads * value),
        }
        if layer:
            shapes |= {
                f"{at}.mlp.gate.weight": (experts, hidden),
                f"{at}.mlp.gate.e_score_correction_bias": (experts,),
                **mlp(f"{at}.mlp.switch_mlp", experts),
                **mlp(f"{at}.mlp.shared_experts"),
            }
        else:
            shapes |= mlp(f"{at}.mlp")
    return _loaded(config, shapes, Quantization("nvfp4", 4, 16), ".switch_mlp.", ".shared_experts.")


def _loaded(config: dict[str, Any], shapes: dict[str, tuple[int, ...]], how: Quantization, *packed: str) -> Any:
    """The model in bfloat16, with matrices packed whose names have one of `packed` in them."""
    found: dict[str, mx.array | Weight] = {}
    for name, shape in shapes.items():
        numbers = _numbers(name, shape)
        wanted = any(part in name for part in packed) and name.endswith(".weight") and len(shape) > 1
        found[name] = quantize(numbers, how) if wanted else numbers
    return load_model(MemoryCheckpoint(config, found).typed(), mx.bfloat16)


def _numbers(name: str, shape: tuple[int, ...]) -> mx.array:
    noise = mx.random.normal(shape)
    if name.endswith("norm.weight"):
        return (1 + 0.1 * noise).astype(mx.bfloat16)
    return (noise * (shape[-1] ** -0.5 if len(shape) > 1 else 1.0)).astype(mx.bfloat16)
