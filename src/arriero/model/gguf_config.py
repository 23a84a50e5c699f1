"""GGUF metadata → a configuration as Hugging Face's `config.json` has it.

Refuses to know MLX: the server reads the same facts for `show`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from arriero.errors import CheckpointError
from arriero.formats.gguf import GGUFFile, GGUFTensor
from arriero.model.gguf_deepseek import deepseek2, glm4moe
from arriero.model.gguf_encoders import ENCODERS, encoder_config
from arriero.model.gguf_hybrids import gpt_oss, nemotron_h
from arriero.model.gguf_keys import Keys
from arriero.model.gguf_orders import TILED
from arriero.model.gguf_windowed import cohere2, cohere2moe, laguna

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "qwen3next": "Qwen3NextForCausalLM",
    "qwen35": "Qwen3_5ForCausalLM",
    "qwen35moe": "Qwen3_5MoeForCausalLM",
    "deepseek2": "DeepseekV3ForCausalLM",
    "glm4moe": "Glm4MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gemma-embedding": "Gemma3TextModel",
    "nemotron_h": "NemotronHForCausalLM",
    "nemotron_h_moe": "NemotronHForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "cohere2moe": "Cohere2MoeForCausalLM",
    "laguna": "LagunaForCausalLM",
    "gptoss": "GptOssForCausalLM",
    **ENCODERS,
}
MODEL_TYPES = {
    "qwen3moe": "qwen3_moe",
    "qwen3next": "qwen3_next",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "deepseek2": "deepseek_v3",
    "glm4moe": "glm4_moe",
    "gemma3": "gemma3_text",
    "gemma-embedding": "gemma3_text",
    "nemotron_h_moe": "nemotron_h",
    "gpt-oss": "gpt_oss",
    "cohere2moe": "cohere2_moe",
    "gptoss": "gpt_oss",
}

_HYBRID = {"qwen3next", "qwen35", "qwen35moe", "nemotron_h", "nemotron_h_moe"}
"""Whose files may say what kind a layer is by numbers of key heads or widths that are 0 for the others."""

_HEADS_BY_LAYER = {"laguna"}
_SCALED_LOGITS = {"cohere2", "cohere2moe"}

_EMBEDDING = "token_embd.weight"
_TOKENS = "tokenizer.ggml.tokens"


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "embedding_scale": (0, 1),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "use_parallel_residual": (False,),
}
"""Keys that change a model's numbers and that nothing here honours, with the values that change nothing."""
_MOST_FACTORS = 4096
"""Of a rotary table: half a head."""


def architecture_of(file: GGUFFile) -> str:
    """The file's `general.architecture`; CheckpointError when it has none."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or not name:
        raise CheckpointError(f"{file.path}: the key general.architecture is missing: not a language model")
    return name


def config_of(files: Sequence[GGUFFile]) -> dict[str, Any]:
    """The configuration; an architecture that we do not know gives only its name, for the registry to refuse."""
    file = files[0]
    architecture = architecture_of(file)
    if architecture not in ARCHITECTURES:
        return {"architectures": [architecture], "model_type": architecture}
    tensors = {name: tensor for part in files for name, tensor in part.tensors.items()}
    if architecture in ENCODERS:
        return encoder_config(file, architecture, tensors)
    if _EMBEDDING not in tensors:
        raise CheckpointError(f"{file.path}: the tensor {_EMBEDDING} is missing; pull the model again")
    keys = Keys(file, architecture, tensors)
    count = keys.largest_of_layers if architecture in _HEADS_BY_LAYER else keys.same_for_all_layers
    heads = count("attention.head_count")
    if not heads:
        raise CheckpointError(f"{file.path}: the key {architecture}.attention.head_count is missing or zero")
    hidden, layers = keys.need("embedding_length"), keys.need("block_count")
    embedding = tensors[_EMBEDDING]
    if len(embedding.shape) != 2 or embedding.shape[1] != hidden or layers > len(tensors):
        raise CheckpointError(
            f"{file.path}: {layers} layers of width {hidden} do not fit {len(tensors)} tensors with "
            f"{_EMBEDDING} of shape {list(embedding.shape)}; pull the model again"
        )
    tokens = file.metadata.array_length(_TOKENS) if _TOKENS in file.metadata else None
    if tokens is not None and tokens > embedding.shape[0]:
        raise CheckpointError(
            f"{file.path}: the vocabulary has {tokens} tokens and {_EMBEDDING} {embedding.shape[0]} rows; "
            "they do not belong together, pull the model again"
        )
    _refuse_unhonoured(keys)
    head_dim = keys.integer("attention.key_length") or keys.integer("rope.dimension_count") or hidden // heads
    if not head_dim:
        raise CheckpointError(f"{file.path}: {heads} heads do not fit a width of {hidden}; pull the model again")
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": MODEL_TYPES.get(architecture, architecture),
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.same_for_all_layers("attention.head_count_kv", zeros=architecture in _HYBRID)
        or heads,
        "head_dim": head_dim,
        "max_position_embeddings": keys.need("context_length"),
        "vocab_size": embedding.shape[0],
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon") or 1e-5,
        "rope_theta": keys.number("rope.freq_base") or 10000.0,
        "tie_word_embeddings": "output.weight" not in tensors,
        "torch_dtype": "float16" if _is_half(tensors.values()) else "bfloat16",
    }
    feed_forward = keys.same_for_all_layers("feed_forward_length", zeros=architecture in _HYBRID)
    if feed_forward:
        config["intermediate_size"] = feed_forward
    rotary = keys.integer("rope.dimension_count")
    if rotary and rotary != head_dim:
        config["partial_rotary_factor"] = rotary / head_dim
    scaling = _rope_scaling(keys, tensors)
    if scaling:
        config["rope_scaling"] = scaling
    special = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    for key, name in special.items():
        value = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(value, int) and value >= 0:
            config[key] = value
    _ADDITIONS[architecture](keys, config)
    return config


def _refuse_unhonoured(keys: Keys) -> None:
    for key, neutral in _NEUTRAL.items():
        value = keys.metadata.get(f"{keys.prefix}.{key}")
        honoured = key == "logit_scale" and keys.prefix in _SCALED_LOGITS
        honoured = honoured or (key == "attention.causal" and _sees_both_ways(keys))
        if value is not None and value not in neutral and not honoured:
            raise CheckpointError(
                f"{keys.path}: the key {keys.prefix}.{key} is {value!r:.60}, which is not supported: "
                "running the model would give wrong answers"
            )


def _is_half(tensors: Iterable[GGUFTensor]) -> bool:
    """Whether most bytes are float16 numbers."""
    sizes = {True: 0, False: 0}
    for tensor in tensors:
        sizes[tensor.type.name == "F16"] += tensor.nbytes
    return sizes[True] > sizes[False]


def generation_config_of(file: GGUFFile) -> dict[str, Any]:
    """Begin and end tokens as `generation_config.json` has them; `eos_token_id` lists every end token of the file."""
    ends = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    listed = file.metadata.get("tokenizer.ggml.eos_token_ids")
    ends += listed if isinstance(listed, list) else []
    found = list(dict.fromkeys(end for end in ends if isinstance(end, int) and end >= 0))
    config: dict[str, Any] = {"eos_token_id": found} if found else {}
    begin = file.metadata.get("tokenizer.ggml.bos_token_id")
    if isinstance(begin, int) and begin >= 0:
        config["bos_token_id"] = begin
    return config


def _rope_scaling(keys: Keys, tensors: Mapping[str, GGUFTensor]) -> dict[str, Any] | None:
    factors = tensors.get("rope_freqs.weight")
    if factors is not None:
        if factors.type.name not in ("F32", "F16"):
            raise CheckpointError(f"{keys.path}: tensor rope_freqs.weight is {factors.type.name}, expected F32")
        if math.prod(factors.shape) > _MOST_FACTORS:
            raise CheckpointError(f"{keys.path}: tensor rope_freqs.weight holds {math.prod(factors.shape)} factors")
        values = [float(value) for value in factors.dense().reshape(-1)]
        if not all(math.isfinite(value) and value > 0 for value in values):
            raise CheckpointError(f"{keys.path}: tensor rope_freqs.weight holds unusable factors ({values[:4]}, …)")
        return {"rope_type": "llama3_factors", "factors": values}
    kind = keys.get("rope.scaling.type", str)
    factor = keys.number("rope.scaling.factor") or keys.number("rope.scale_linear") or 1.0
    if kind == "none" or (kind in (None, "linear", "yarn") and factor == 1.0):
        return None
    if kind in (None, "linear"):
        return {"rope_type": "linear", "factor": factor}
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    gain = keys.number("rope.scaling.attn_factor") or keys.number("rope.scaling.yarn_attn_factor")
    if gain and kind == "yarn":
        # The file's gain comes on top of YaRN's own; Hugging Face's attention_factor replaces it.
        gain *= 0.1 * math.log(factor) + 1.0
    optional = {
        "original_max_position_embeddings": keys.integer("rope.scaling.original_context_length"),
        "attention_factor": gain,
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast"),
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow"),
    }
    return scaling | {key: value for key, value in optional.items() if value is not None}


def _llama(keys: Keys, config: dict[str, Any]) -> None:
    if keys.integer("expert_count"):
        config["architectures"], config["model_type"] = ["MixtralForCausalLM"], "mixtral"
    if "partial_rotary_factor" in config and keys.prefix == "llama":
        # Rotary pairs of this architecture are neighbours: the first n rows are other pairs than Hugging Face's.
        raise CheckpointError(f"{keys.path}: rotary embedding of a part of the head is not supported for llama")
    window = keys.integer("attention.sliding_window")
    if window:
        config["sliding_window"] = window


def _qwen2(keys: Keys, config: dict[str, Any]) -> None:
    config["attention_bias"] = True
    _llama(keys, config)


def _qwen3moe(keys: Keys, config: dict[str, Any]) -> None:
    normed = keys.get("expert_weights_norm", bool)
    if normed is None:
        normed = keys.get("norm_top_k_prob", bool)
    config |= {
        "num_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "moe_intermediate_size": keys.need("expert_feed_forward_length"),
        "norm_topk_prob": normed is not False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen35(keys: Keys, config: dict[str, Any]) -> None:
    """Layers past the last are those of the head that predicts several tokens."""
    drafts = keys.integer("nextn_predict_layers") or 0
    layers = config["num_hidden_layers"] - drafts
    heads, width, key_heads = keys.need("ssm.time_step_rank"), keys.need("ssm.inner_size"), keys.need("ssm.group_count")
    if layers < 1 or width % heads or heads % key_heads:
        raise CheckpointError(
            f"{keys.path}: {config['num_hidden_layers']} layers, {drafts} of them for drafts, {heads} value heads of "
            f"{width} numbers together and {key_heads} key heads do not fit; pull the model again"
        )
    rotary = keys.integer("rope.dimension_count") or config["head_dim"]
    config |= {
        "num_hidden_layers": layers,
        "mtp_num_hidden_layers": drafts,
        "partial_rotary_factor": rotary / config["head_dim"],
        "linear_conv_kernel_dim": keys.need("ssm.conv_kernel"),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": keys.need("ssm.state_size"),
        "linear_value_head_dim": width // heads,
        "full_attention_interval": keys.integer("full_attention_interval") or 4,
    }
    tiled = keys.get("ssm.v_head_reordered", bool)
    config[TILED] = keys.prefix != "qwen3next" if tiled is None else tiled
    recurrent = keys.get("attention.recurrent_layers", list)
    counts = keys.get("attention.head_count_kv", (int, list))
    if recurrent is None and isinstance(counts, list):
        recurrent = [count == 0 for count in counts]
    if recurrent is not None:
        if len(recurrent) < layers or not all(isinstance(flag, int) for flag in recurrent):
            raise keys.unusable("attention.recurrent_layers", recurrent)
        config["layer_types"] = ["linear_attention" if flag else "full_attention" for flag in recurrent[:layers]]


def _qwen35moe(keys: Keys, config: dict[str, Any]) -> None:
    _qwen35(keys, config)
    _qwen3moe(keys, config)
    config["shared_expert_intermediate_size"] = keys.need("expert_shared_feed_forward_length")


def _gemma(keys: Keys, config: dict[str, Any], pattern: int, largest: int) -> None:
    """Windows and caps; in the largest size (by layer count) the softmax scale follows the hidden size.

    Gemma's activations pass float16's range, whatever the weights are stored in.
    """
    config["torch_dtype"] = "bfloat16"
    wide = config["hidden_size"] // config["num_attention_heads"]
    config["query_pre_attn_scalar"] = wide if config["num_hidden_layers"] == largest else config["head_dim"]
    config["hidden_activation"] = "gelu_pytorch_tanh"
    window = keys.integer("attention.sliding_window")
    if window:
        config["sliding_window"] = window
    key = "attention.sliding_window_pattern"
    stored = keys.get(key, (int, list))
    layers = config["num_hidden_layers"]
    if isinstance(stored, list):
        if len(stored) < layers or not all(isinstance(flag, int) for flag in stored):
            raise keys.unusable(key, stored)
        sliding = [bool(flag) for flag in stored[:layers]]
    else:
        every = keys.integer(key) or pattern
        config["sliding_window_pattern"] = every
        sliding = [(layer + 1) % every != 0 for layer in range(layers)]
    config["layer_types"] = ["sliding_attention" if flag else "full_attention" for flag in sliding]
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        value = keys.number(cap)
        if value:
            config[cap] = value


def _gemma2(keys: Keys, config: dict[str, Any]) -> None:
    config |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    _gemma(keys, config, pattern=2, largest=46)


def _gemma3(keys: Keys, config: dict[str, Any]) -> None:
    _gemma(keys, config, pattern=6, largest=62)
    # Two spellings circulate for the bases of the global and the sliding layers.
    config["rope_theta"] = keys.number("rope.freq_base") or keys.number("rope.global.freq_base") or 1e6
    config["rope_local_base_freq"] = keys.number("rope.freq_base_swa") or keys.number("rope.local.freq_base") or 10000.0

    if _sees_both_ways(keys):
        config |= {"architectures": ["Gemma3TextModel"], "use_bidirectional_attention": True}


def _sees_both_ways(keys: Keys) -> bool:
    """Whether a file of Gemma 3 is one of EmbeddingGemma: Ollama's library has it under Gemma 3's name."""
    return keys.prefix == "gemma-embedding" or (keys.prefix == "gemma3" and bool(keys.integer("pooling_type")))


def _nothing(keys: Keys, config: dict[str, Any]) -> None:
    del keys, config


_ADDITIONS: dict[str, Callable[[Keys, dict[str, Any]], None]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _nothing,
    "qwen3moe": _qwen3moe,
    "qwen3next": _qwen35moe,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35moe,
    "deepseek2": deepseek2,
    "glm4moe": glm4moe,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma-embedding": _gemma3,
    "nemotron_h": nemotron_h,
    "nemotron_h_moe": nemotron_h,
    "gpt-oss": gpt_oss,
    "cohere2": cohere2,
    "cohere2moe": cohere2moe,
    "laguna": laguna,
    "gptoss": gpt_oss,
}
