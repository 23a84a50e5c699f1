"""Built-in renderers by the names that Modelfiles use, and which of them a model without a template needs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files as package_files
from typing import Any

from arriero.chat.files import TextFiles

_XHIGH = (
    "Reasoning effort is set to xhigh. Please think carefully through the task, validate key assumptions, consider "
    "plausible alternatives, and prioritize correctness, consistency, and clarity in the final answer."
)
_LOW = (
    "Reasoning effort is set to low. Keep your thinking brief and focused, moving directly to the conclusion without "
    "unnecessary elaboration."
)


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A template of the package and what it reads beside the conversation."""

    file: str
    names: Mapping[str, Any] = field(default_factory=dict)

    @property
    def source(self) -> str:
        """The template's text."""
        return _text(f"{self.file}.jinja")

    @property
    def variables(self) -> dict[str, Any]:
        """What the template reads by name."""
        return {"function_calls": _text("function_calls.txt"), **self.names}


_HYBRID, _ALWAYS, _NEVER = ({"thinking_mode": mode} for mode in ("hybrid", "always", "never"))
RENDERERS: Mapping[str, BuiltIn] = {
    "qwen3": BuiltIn("qwen3", _HYBRID),
    "qwen3-instruct": BuiltIn("qwen3", _NEVER),
    "qwen3-thinking": BuiltIn("qwen3", _ALWAYS),
    "qwen3-next": BuiltIn("qwen3", _NEVER),
    "qwen3-vl-instruct": BuiltIn("qwen3", _NEVER),
    "qwen3-vl-thinking": BuiltIn("qwen3", _ALWAYS),
    "qwen3-coder": BuiltIn("qwen3-coder"),
    "qwen3.5": BuiltIn("qwen3.5"),
    "qwen3.8": BuiltIn("qwen3.5", {"efforts": {"low": _LOW, "xhigh": _XHIGH}}),
    "gemma3": BuiltIn("gemma3"),
    "gemma4": BuiltIn("gemma4"),
    "gemma4-small": BuiltIn("gemma4", {"empty_thought": False}),
    "gemma4-large": BuiltIn("gemma4", {"empty_thought": True}),
    "gemma4-nemotron": BuiltIn("gemma4", {"text_first": True}),
    "nemotron-3": BuiltIn("nemotron-3", {"toggles": True}),
    "nemotron-3-nano": BuiltIn("nemotron-3", {"toggles": True}),
    "nemotron-3.5-nano": BuiltIn("nemotron-3"),
    "llama3": BuiltIn("llama3", {"date_string": "26 Jul 2024"}),
    "mistral": BuiltIn("mistral"),
    "mistral-v11": BuiltIn("mistral-tekken", {"ids": True}),
    "mistral-v13": BuiltIn("mistral-tekken", {"ids": False}),
    "gpt-oss": BuiltIn("gpt-oss", {"indent": " " * 16}),
    "deepseek-v3": BuiltIn("deepseek-v3"),
    "deepseek3.1": BuiltIn("deepseek-v3"),
    "glm-4": BuiltIn("glm-4"),
}
"""Name in a Modelfile's RENDERER → template."""

_DETECTED = (
    ("gemma4", "<turn|>", "gemma4"),
    ("gemma3", "<end_of_turn>", "gemma3"),
    ("qwen3_5", "<|im_end|>", "qwen3.5"),
    ("qwen35", "<|im_end|>", "qwen3.5"),
    ("qwen3", "<|im_end|>", "qwen3"),
    ("nemotron_h", "<|im_end|>", "nemotron-3"),
    ("gpt_oss", "<|return|>", "gpt-oss"),
    ("gptoss", "<|return|>", "gpt-oss"),
    ("deepseek_v3", "<｜end▁of▁sentence｜>", "deepseek-v3"),
    ("glm4_moe", "<|user|>", "glm-4"),
    ("llama", "<|eot_id|>", "llama3"),
)


def renderer_of(files: TextFiles, ends: Callable[[str], bool]) -> str:
    """The renderer of a model that has no template: by its architecture and the token that ends its turns; else ''.

    `ends` says whether a token ends a reply. It sets a model that was taught to converse apart from its base.
    """
    config = files.json("config.json")
    kind = str(files.metadata.get("general.architecture") or config.get("model_type") or "").replace("-", "_")
    return next((name for part, end, name in _DETECTED if kind.startswith(part) and ends(end)), "")


def variables_of(built_in: BuiltIn, files: TextFiles) -> dict[str, Any]:
    """What a built-in template reads by name, for one model."""
    found = built_in.variables
    if built_in.file == "gemma4":
        found.setdefault("empty_thought", not _has_layer_inputs(files))
    return found


def _has_layer_inputs(files: TextFiles) -> bool:
    """Whether a Gemma has embeddings for each layer, as the small ones do, which are not taught the empty channel."""
    config = files.json("config.json")
    text = config.get("text_config")
    width = (text if isinstance(text, dict) else config).get("hidden_size_per_layer_input")
    return bool(width or files.metadata.get("gemma4.embedding_length_per_layer_input"))


@functools.cache
def _text(name: str) -> str:
    return (package_files(__package__) / name).read_text("utf-8")
