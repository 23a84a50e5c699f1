"""The list of architectures, and one file for each.

Importing this module loads no array library, so that `create` can ask whether a model will run before it stores it.
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from arriero.errors import UnsupportedArchitecture
from arriero.settings import raw

if TYPE_CHECKING:
    import mlx.core as mx

    from arriero.model.checkpoint import Checkpoint
    from arriero.model.contract import Model

ARCHITECTURES: dict[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3",
    "Qwen3NextForCausalLM": "qwen3_5",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5",
    "Qwen4ExpForCausalLM": "qwen4_exp",
    "Qwen4ExpForConditionalGeneration": "qwen4_exp",
    "Cohere2ForCausalLM": "cohere2",
    "Cohere2MoeForCausalLM": "cohere2",
    "LagunaForCausalLM": "laguna",
    "NemotronHForCausalLM": "nemotron_h",
    "GptOssForCausalLM": "gpt_oss",
    "DeepseekV2ForCausalLM": "deepseek_v3",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Glm4MoeLiteForCausalLM": "deepseek_v3",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Gemma2ForCausalLM": "gemma3",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma4ForCausalLM": "gemma4",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Gemma4UnifiedForCausalLM": "gemma4",
    "Gemma4UnifiedForConditionalGeneration": "gemma4",
}
"""Names in a configuration's `architectures`, and the file of this folder that builds each with its `load`."""

MODEL_TYPES: dict[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen4_exp_text": "Qwen4ExpForCausalLM",
    "qwen4_exp": "Qwen4ExpForConditionalGeneration",
    "cohere2": "Cohere2ForCausalLM",
    "cohere2_moe": "Cohere2MoeForCausalLM",
    "laguna": "LagunaForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4": "Gemma4ForConditionalGeneration",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "gemma4_unified": "Gemma4UnifiedForConditionalGeneration",
}
"""What `model_type` means where `architectures` is missing."""


_TABLES = re.compile(r"\.ngram_embedding\.shard_\d+\.weight")


def resident_tables() -> bool:
    """Whether `ARRIERO_RESIDENT_TABLES` asks for tables of n-grams in memory instead of their files."""
    return raw("RESIDENT_TABLES").lower() not in ("", "0", "f", "false")


def stays_in_files(name: str) -> bool:
    """Whether a tensor of this name takes no memory while its model runs, since rows are read from its file."""
    return _TABLES.search(name) is not None and not resident_tables()


def known_architectures() -> list[str]:
    """The names that `load_model` knows, sorted."""
    return sorted(ARCHITECTURES)


def check_config(config: Mapping[str, Any]) -> str:
    """The architecture that a configuration will run as: its first known name, else by its `model_type`.

    Raises UnsupportedArchitecture with the known names and the nearest one.
    """
    named = config.get("architectures")
    names = [n for n in named if isinstance(n, str)] if isinstance(named, list) else []
    for name in names:
        if name in ARCHITECTURES:
            return name
    kind = config.get("model_type")
    if not names and isinstance(kind, str) and kind in MODEL_TYPES:
        return MODEL_TYPES[kind]
    asked = ", ".join(names) or (f"model_type {kind!r}" if kind else "")
    if not asked:
        raise UnsupportedArchitecture(
            "config.json names no architecture: both `architectures` and `model_type` are missing. "
            f"Known architectures: {', '.join(known_architectures())}"
        )
    near = _nearest(names or [str(kind)])
    hint = f" Did you mean {near}?" if near else ""
    if any(name in MODEL_TYPES for name in names):
        # GGUF files name families, not classes.
        hint = " It runs from safetensors, but not from a GGUF file."
    raise UnsupportedArchitecture(
        f"architecture {asked} is not supported.{hint} Known architectures: {', '.join(known_architectures())}"
    )


def load_model(checkpoint: Checkpoint, dtype: mx.Dtype) -> Model:
    """Build the model that a checkpoint's configuration names, with activations of `dtype`."""
    name = check_config(checkpoint.config)
    module = importlib.import_module(f"{__name__}.{ARCHITECTURES[name]}")
    model: Model = module.Model.load(checkpoint, dtype)
    return model


def _nearest(names: list[str]) -> str | None:
    known = {name.lower(): name for name in ARCHITECTURES} | MODEL_TYPES
    for name in names:
        matches = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.6)
        if matches:
            return known[matches[0]]
    return None
