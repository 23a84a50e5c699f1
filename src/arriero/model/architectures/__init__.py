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
from arriero.model.adapters.known import EXTRA, mlx_lm_module, mlx_lm_version
from arriero.settings import raw

if TYPE_CHECKING:
    import mlx.core as mx

    from arriero.model.checkpoint import Checkpoint
    from arriero.model.contract import Encoder, Model

KNOWN: dict[str, tuple[str, str]] = {
    "LlamaForCausalLM": ("llama", "llama"),
    "MistralForCausalLM": ("llama", "mistral"),
    "Qwen2ForCausalLM": ("qwen2", "qwen2"),
    "Qwen3ForCausalLM": ("qwen3", "qwen3"),
    "Qwen3MoeForCausalLM": ("qwen3", "qwen3_moe"),
    "Qwen3NextForCausalLM": ("qwen3_5", "qwen3_next"),
    "Qwen3_5ForCausalLM": ("qwen3_5", "qwen3_5_text"),
    "Qwen3_5ForConditionalGeneration": ("qwen3_5", "qwen3_5"),
    "Qwen3_5MoeForCausalLM": ("qwen3_5", "qwen3_5_moe_text"),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_5", "qwen3_5_moe"),
    "Qwen4ExpForCausalLM": ("qwen4_exp", "qwen4_exp_text"),
    "Qwen4ExpForConditionalGeneration": ("qwen4_exp", "qwen4_exp"),
    "Cohere2ForCausalLM": ("cohere2", "cohere2"),
    "Cohere2MoeForCausalLM": ("cohere2", "cohere2_moe"),
    "LagunaForCausalLM": ("laguna", "laguna"),
    "GraniteForCausalLM": ("granite", "granite"),
    "NemotronHForCausalLM": ("nemotron_h", "nemotron_h"),
    "GptOssForCausalLM": ("gpt_oss", "gpt_oss"),
    "DeepseekV2ForCausalLM": ("deepseek_v3", "deepseek_v2"),
    "DeepseekV3ForCausalLM": ("deepseek_v3", "deepseek_v3"),
    "Glm4MoeLiteForCausalLM": ("deepseek_v3", "glm4_moe_lite"),
    "Glm4MoeForCausalLM": ("glm4_moe", "glm4_moe"),
    "Gemma2ForCausalLM": ("gemma3", "gemma2"),
    "Gemma3ForCausalLM": ("gemma3", "gemma3_text"),
    "Gemma3ForConditionalGeneration": ("gemma3", "gemma3"),
    "Gemma4ForCausalLM": ("gemma4", "gemma4_text"),
    "Gemma4ForConditionalGeneration": ("gemma4", "gemma4"),
    "Gemma4UnifiedForCausalLM": ("gemma4", "gemma4_unified_text"),
    "Gemma4UnifiedForConditionalGeneration": ("gemma4", "gemma4_unified"),
}
"""Each name in a configuration's `architectures`: the file of this folder that builds it with its `Model.load`, and the
`model_type` that means it where `architectures` is missing. The one list of architectures.
"""

ENCODERS: dict[str, tuple[str, str]] = {
    "BertModel": ("bert", "bert"),
    "RobertaModel": ("bert", "roberta"),
    "XLMRobertaModel": ("bert", "xlm-roberta"),
    "NomicBertModel": ("nomic_bert", "nomic_bert"),
    "ModernBertModel": ("modernbert", "modernbert"),
    "Gemma3TextModel": ("gemma3_encoder", "gemma_embedding"),
}
"""The same for those that read whole texts and write none; each file has an `Encoder` for its `Model`."""
KNOWN |= ENCODERS

ARCHITECTURES: dict[str, str] = {name: file for name, (file, _) in KNOWN.items()}
MODEL_TYPES: dict[str, str] = {kind: name for name, (_, kind) in KNOWN.items()}


_TABLES = re.compile(r"\.ngram_embedding\.shard_\d+\.weight")


def resident_tables() -> bool:
    """Whether `ARRIERO_RESIDENT_TABLES` asks for tables of n-grams in memory instead of their files."""
    return raw("RESIDENT_TABLES").lower() not in ("", "0", "f", "false")


def loaded_bytes(sizes: Mapping[str, int]) -> int:
    """Bytes that tensor layers of these names and sizes take once they are loaded.

    Tables that stay in their files take none. FP8 matrices are decoded to twice their size: they are told by scales
    named `weight_scale_inv`, or by having hardly any (formats with small groups have one for at most 32 numbers).
    """
    total = 0
    for name, size in sizes.items():
        if stays_in_files(name):
            continue
        scales = sizes.get(f"{name}_scale")
        decoded = f"{name}_scale_inv" in sizes or (scales is not None and scales * 64 < size)
        total += 2 * size if decoded else size
    return total


def stays_in_files(name: str) -> bool:
    """Whether a tensor of this name takes no memory while its model runs, since rows are read from its file."""
    return _TABLES.search(name) is not None and not resident_tables()


def known_architectures() -> list[str]:
    """The names that `load_model` knows, sorted."""
    return sorted(ARCHITECTURES)


def check_config(config: Mapping[str, Any]) -> str:
    """The architecture that a configuration will run as: its first known name, else by its `model_type`.

    What is not ours goes by the name that it has where the installed mlx-lm knows it. Raises UnsupportedArchitecture
    with the known names and the nearest one.
    """
    named = config.get("architectures")
    names = [n for n in named if isinstance(n, str)] if isinstance(named, list) else []
    for name in names:
        if name in ARCHITECTURES:
            return name
    kind = config.get("model_type")
    if kind is not None and not isinstance(kind, str):
        raise UnsupportedArchitecture(f"config.json has the model_type {kind!r:.80}, which is no text")
    if not names and kind in MODEL_TYPES:
        return MODEL_TYPES[kind]
    asked = ", ".join(names) or (f"model_type {kind!r}" if kind else "")
    if not asked:
        raise UnsupportedArchitecture(
            "config.json names no architecture: both `architectures` and `model_type` are missing. "
            f"Known architectures: {', '.join(known_architectures())}"
        )
    if kind not in MODEL_TYPES and mlx_lm_module(config) is not None:
        return names[0] if names else str(kind)
    near = _nearest(names or [str(kind)])
    hint = f" Did you mean {near}?" if near else ""
    beyond = _beyond()
    if kind in names:
        # GGUF files name families, not classes.
        ours = any(name in MODEL_TYPES for name in names)
        hint = " It runs from safetensors, but not from a GGUF file." if ours else hint
        beyond = "mlx-lm is of no help with GGUF files"
    raise UnsupportedArchitecture(
        f"architecture {asked} is not supported.{hint} Known architectures: {', '.join(known_architectures())}. "
        f"{beyond}"
    )


def runs_through(config: Mapping[str, Any]) -> str | None:
    """The package that a configuration's architecture runs through where it is not ours; None for ours."""
    try:
        return "mlx-lm" if check_config(config) not in ARCHITECTURES else None
    except UnsupportedArchitecture:
        return None


def encodes(config: Mapping[str, Any]) -> bool:
    """Whether a configuration's architecture reads whole texts and writes none."""
    try:
        return check_config(config) in ENCODERS
    except UnsupportedArchitecture:
        return False


def load_model(checkpoint: Checkpoint, dtype: mx.Dtype) -> Model | Encoder:
    """Build the model or encoder that a checkpoint's configuration names, with activations of `dtype`."""
    name = check_config(checkpoint.config)
    ours = ARCHITECTURES.get(name)
    module = importlib.import_module(f"{__name__}.{ours}" if ours else "arriero.model.adapters.mlx_lm")
    model: Model | Encoder = module.Model.load(checkpoint, dtype)
    return model


def _beyond() -> str:
    """What there is besides our own architectures."""
    found = mlx_lm_version()
    if found is None:
        return f"From safetensors, what mlx-lm knows runs too, where it is installed ({EXTRA})"
    return f"mlx-lm {found}, which is installed, does not know it"


def _nearest(names: list[str]) -> str | None:
    known = {name.lower(): name for name in ARCHITECTURES} | MODEL_TYPES
    for name in names:
        for match in difflib.get_close_matches(name.lower(), list(known), n=3, cutoff=0.6):
            # Any two names that end in ForCausalLM are near by that alone.
            if difflib.SequenceMatcher(None, _stem(name), _stem(match)).ratio() >= 0.6:
                return known[match]
    return None


def _stem(name: str) -> str:
    return name.lower().partition("for")[0]
