"""Towers for images, one file for each family, and which checkpoints have one that we load.

Importing this module loads no array library, so that the server process and the store can ask.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

Family = Literal["qwen", "gemma3", "gemma4", "gemma4_unified"]

FAMILIES: dict[str, Family] = {
    "Qwen3_5ForConditionalGeneration": "qwen",
    "Qwen3_5MoeForConditionalGeneration": "qwen",
    "Qwen4ExpForConditionalGeneration": "qwen",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Gemma4UnifiedForConditionalGeneration": "gemma4_unified",
}
"""Architectures whose images we take."""

TENSORS: dict[Family, str] = {
    "qwen": r"^(model\.)?(visual|vision_tower)\.",
    "gemma3": r"^(model\.)?vision_tower\.",
    "gemma4": r"^(model\.)?vision_tower\.",
    "gemma4_unified": r"^(model\.)?(vision_embedder|embed_vision)\.",
}
"""What the names of a tower's tensors begin with."""

TOWER_WORDS = ("visual", "vision")
"""One of these is in the name of every tensor of a tower, and in hardly any other."""


def family_of(config: Mapping[str, Any]) -> Family | None:
    """The kind of tower that a configuration declares, None for a model of text and for towers that we don't load."""
    names = config.get("architectures")
    if not isinstance(names, list) or not isinstance(config.get("vision_config"), dict):
        return None
    return next((FAMILIES[name] for name in names if isinstance(name, str) and name in FAMILIES), None)


def tower_of(config: Mapping[str, Any], tensors: Iterable[str]) -> Family | None:
    """The kind of tower that a checkpoint has: declared, and there.

    Text parts of such models are often published with the whole model's configuration, so that alone says nothing.
    """
    family = family_of(config)
    if family is None:
        return None
    pattern = re.compile(TENSORS[family])
    return family if any(pattern.search(name) for name in tensors) else None
