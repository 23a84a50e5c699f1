"""Tensor names of GGUF files ⇄ Hugging Face names."""

from __future__ import annotations

import re

from arriero.model.gguf_encoders import ENCODERS, encoder_name

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "dense_2": "dense.0",
    "dense_3": "dense.1",
}

_LLAMA = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MOE = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_SHARED = {
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_SUMMED = {
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.embed_q",
    "attn_v_b": "self_attn.unembed_out",
}
_DELTA_NET = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

_NEMOTRON_H = {
    "attn_norm": "norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ssm_in": "mixer.in_proj",
    "ssm_conv1d": "mixer.conv1d",
    "ssm_norm": "mixer.norm",
    "ssm_out": "mixer.out_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_exps": "mixer.experts.up_proj",
    "ffn_down_exps": "mixer.experts.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}
_GPT_OSS = _LLAMA | {
    "attn_sinks.weight": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_GPTOSS = _GPT_OSS | {
    "attn_qkv": "self_attn.qkv_proj",
    "attn_out": "self_attn.o_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
}
"""As Ollama's library has it: the rows of gate and up take turns, and `attn_sinks` has no suffix."""

LAYER_NAMES: dict[str, dict[str, str]] = {
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "qwen3moe": _LLAMA | _MOE,
    "qwen3next": _LLAMA | _MOE | _SHARED | _DELTA_NET,
    "qwen35": _LLAMA | _DELTA_NET,
    "qwen35moe": _LLAMA | _MOE | _SHARED | _DELTA_NET,
    "gemma2": _LLAMA | _GEMMA,
    "gemma3": _LLAMA | _GEMMA,
    "gemma-embedding": _LLAMA | _GEMMA,
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "gpt-oss": _GPT_OSS,
    "gptoss": _GPTOSS,
    "deepseek2": _LLAMA | _MOE | _SUMMED | _LATENT,
    "cohere2": _LLAMA,
    "cohere2moe": _LLAMA | _MOE | _SUMMED,
    "laguna": _LLAMA | _MOE | _SUMMED | {"attn_gate": "self_attn.g_proj"},
    "glm4moe": _LLAMA | _MOE | _SUMMED | {"post_attention_norm": "post_attention_layernorm"},
}
"""Per GGUF architecture: a layer's module → the Hugging Face module; one with its suffix (`x.bias`) → the tensor."""

PARAMETERS = {"ssm_a": "linear_attn.A_log", "ssm_dt": "linear_attn.dt_bias"}
"""Tensors of a layer whose Hugging Face names have no suffix; `ssm_a` holds −exp(A_log), and `ssm_dt` may be a bias."""
MIXER_PARAMETERS = {"ssm_a": "mixer.A_log", "ssm_d": "mixer.D", "ssm_dt": "mixer.dt_bias"}
"""The same for Mamba-2."""

CONSUMED = re.compile(r"^(rope_freqs|blk\.\d+\.(rope_freqs|attn_rot_embd))\.weight$")
"""Rotary tables: read into the configuration, or made anew by every architecture."""

_LAYER = re.compile(r"^blk\.(\d+)\.([a-z0-9_]+)\.(weight|bias)$")
_SINKS = re.compile(r"^blk\.(\d+)\.attn_sinks$")
_PARAMETER = re.compile(r"^blk\.(\d+)\.(ssm_a|ssm_dt?)(?:\.bias)?$")


def hugging_face_name(architecture: str, name: str) -> str:
    """The Hugging Face name of a tensor; names that we do not know stay as they are."""
    if architecture in ENCODERS:
        return encoder_name(architecture, name)
    modules = LAYER_NAMES.get(architecture)
    if modules is None:
        return name
    module, _, kind = name.rpartition(".")
    if module in _TOP and kind in ("weight", "bias"):
        return f"{_TOP[module]}.{kind}"
    match = _LAYER.match(name)
    if match and f"{match[2]}.{match[3]}" in modules:
        return f"model.layers.{match[1]}.{modules[f'{match[2]}.{match[3]}']}"
    if match and match[2] in modules:
        return f"model.layers.{match[1]}.{modules[match[2]]}.{match[3]}"
    sinks = _SINKS.match(name)
    if sinks and "attn_sinks.weight" in modules:
        return f"model.layers.{sinks[1]}.{modules['attn_sinks.weight']}"
    parameter = _PARAMETER.match(name)
    parameters = MIXER_PARAMETERS if "ssm_in" in modules else PARAMETERS
    if parameter and "ssm_out" in modules and parameter[2] in parameters:
        return f"model.layers.{parameter[1]}.{parameters[parameter[2]]}"
    return name
