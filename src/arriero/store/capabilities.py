"""What a stored model can do: from its configuration, its templates, its parser, and the header of a GGUF file."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from arriero.errors import StoreError
from arriero.model.vision import TOWER_WORDS, tower_of
from arriero.store import manifests

if TYPE_CHECKING:
    from arriero.store.model import StoredModel

log = logging.getLogger(__name__)
_TOOLS_ONLY = "functiongemma gemma4-no-thinking generic lfm2 llama3 olmo3 qwen3 qwen3-coder qwen3-vl-instruct"
_BOTH = (
    "cogito cohere deepseek deepseek3 gemma4 glimmer glm glm-4.7 glm-ocr gpt-oss harmony kimi laguna lfm2-thinking "
    "minimax ministral mistral nemotron-3-nano nemotron-3.5-nano ornith poolside-v1 qwen qwen3-thinking "
    "qwen3-vl-thinking qwen3.5 qwen3.8 seed"
)
PARSER_CAPABILITIES: Mapping[str, tuple[str, ...]] = (
    dict.fromkeys(_TOOLS_ONLY.split(), ("tools",))
    | dict.fromkeys(_BOTH.split(), ("tools", "thinking"))
    | {"olmo3-think": ("thinking",), "passthrough": ()}
)
"""What a built-in parser brings, by the names that Modelfiles and configuration blobs use."""

_THINKING = ("[/THINK]", "<channel|>", "<|channel|>analysis", "</seed:think>")
"""What templates write around thinking, beside the commonest tags."""


def capabilities_of(model: StoredModel) -> list[str]:
    """Capabilities in the order of detection, each once.

    The configuration's own list is complete for safetensors models and remote stubs, and a start for GGUF files; only
    `vision` is said of those models alone whose tower we load.
    """
    found = _without_vision(model)
    if model.config.remote_model or not _sees(model):
        return found
    return [*found[:1], "vision", *found[1:]]


def _without_vision(model: StoredModel) -> list[str]:
    found = list(model.config.capabilities or ())
    if not model.config.remote_model:
        found = [capability for capability in found if capability != "vision"]
    if found and (model.format != "gguf" or model.config.remote_model):
        return found
    try:
        if not found:
            found += _without_list(model)
        if model.template is not None:
            found += go_template_capabilities(model.template)
    except StoreError as error:
        log.warning("%s", error)
        found = found or ["completion"]
    found += PARSER_CAPABILITIES.get(model.parser, ())
    if model.config.model_family in ("gptoss", "gpt-oss"):
        found.append("thinking")
    return list(dict.fromkeys(found))


def _sees(model: StoredModel) -> bool:
    """Whether the model has a tower for images that we load."""
    names = [layer.name for layer in model.manifest.of(manifests.TENSOR)]
    if not any(part in name for name in names for part in TOWER_WORDS):
        return False
    try:
        return tower_of(model.json_file("config.json"), names) is not None
    except StoreError as error:
        log.warning("%s", error)
        return False


def _without_list(model: StoredModel) -> list[str]:
    """For a configuration that has no list; a model with a Go template is one that chats."""
    if model.template is not None:
        return ["completion", *(template_capabilities(model.template) if "{%" in model.template else ())]
    if model.format == "gguf":
        metadata = model.gguf_metadata
        jinja = metadata.get("tokenizer.chat_template")
        return metadata_capabilities(metadata) + template_capabilities(jinja if isinstance(jinja, str) else "")
    return ["completion", *template_capabilities(model.chat_template or "")]


def template_capabilities(jinja: str) -> list[str]:
    """`tools` and `thinking`, as far as a Jinja chat template shows them."""
    found = []
    if re.search(r"\btools\b", jinja):
        found.append("tools")
    others = any(mark in jinja for mark in _THINKING)
    if (
        others
        or ("<think>" in jinja and "</think>" in jinja)
        or re.search(r"""split\(\s*['"]</think>['"]\s*\)""", jinja)
    ):
        found.append("thinking")
    return found


def go_template_capabilities(template: str) -> list[str]:
    """`tools`, `insert` and `thinking`, as far as a Go template shows them."""
    actions = " ".join(re.findall(r"\{\{(.*?)\}\}", template, re.DOTALL))
    found = [name for field, name in ((".Tools", "tools"), (".Suffix", "insert")) if re.search(rf"\{field}\b", actions)]
    if re.search(r"\.Thinking\b", actions):
        found.append("thinking")
    return found


def metadata_capabilities(metadata: Mapping[str, Any]) -> list[str]:
    """What a GGUF header's keys show; images and sound are not claimed, since GGUF models don't take them here."""
    architecture = str(metadata.get("general.architecture", ""))
    return ["embedding" if f"{architecture}.pooling_type" in metadata else "completion"]
