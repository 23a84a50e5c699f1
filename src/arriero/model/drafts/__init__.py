"""Draft models: one file each, a list of them, and how one is found for a target. Refuses to know the engine.

A draft is either a part of its target's checkpoint (heads for several tokens, `mtp.*`) or a checkpoint of its own.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from arriero.errors import UnsupportedArchitecture

if TYPE_CHECKING:
    import mlx.core as mx

    from arriero.model.checkpoint import Checkpoint
    from arriero.model.contract import Draft, Model

DRAFTS: dict[str, tuple[str, str]] = {
    "DFlashDraftModel": ("dflash", "BlockDraft"),
    "DFlashLagunaForCausalLM": ("dflash", "BlockDraft"),
    "DFlash2DraftModel": ("dflash2", "SelectingBlockDraft"),
    "Gemma4AssistantForCausalLM": ("gemma4_assistant", "Assistant"),
    "Gemma4UnifiedAssistantForCausalLM": ("gemma4_assistant", "Assistant"),
}
"""Names in a draft's `architectures`, and the file of this folder and its class that builds each with its `load`.

`model_type` decides nothing: published block drafts say `qwen3` there.
"""

HEADS: dict[str, tuple[str, str]] = {"qwen3_5": ("mtp", "Head"), "qwen4_exp": ("mtp_flash_next", "StreamsHead")}
"""Files of `architectures` whose checkpoints may hold a head for several tokens, and the file and class of it."""


def check_config(config: Mapping[str, Any]) -> str:
    """The name that a draft's configuration will load as; UnsupportedArchitecture with the known ones."""
    named = config.get("architectures")
    names = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    for name in names:
        if name in DRAFTS:
            return name
    asked = ", ".join(names) or "with no `architectures` in its config.json"
    raise UnsupportedArchitecture(f"draft model {asked} is not supported; known drafts: {', '.join(sorted(DRAFTS))}")


def is_draft(config: Mapping[str, Any]) -> bool:
    """Whether a configuration is that of a draft, which runs beside its model only."""
    named = config.get("architectures")
    return isinstance(named, list) and any(isinstance(name, str) and name in DRAFTS for name in named)


def load_draft(checkpoint: Checkpoint, target: Model, dtype: mx.Dtype) -> Draft:
    """Build the draft of a checkpoint of its own, for this target.

    Raises UnsupportedArchitecture, or CheckpointError that says what of the two does not fit, with both numbers.
    """
    file, name = DRAFTS[check_config(checkpoint.config)]
    importlib.import_module(f"{__name__}.fit").expect_support(target)
    draft: Draft = getattr(importlib.import_module(f"{__name__}.{file}"), name).load(checkpoint, target, dtype)
    return draft


def load_head(checkpoint: Checkpoint, target: Model, dtype: mx.Dtype) -> Draft | None:
    """Build the head for several tokens out of the target's own checkpoint; None where it holds none.

    The tensors decide: configurations name heads that exports have dropped. CheckpointError for one that is incomplete.
    """
    architecture = type(target).__module__.rpartition(".")[2]
    if architecture not in HEADS:
        return None
    file, name = HEADS[architecture]
    module = importlib.import_module(f"{__name__}.{file}")
    where = module.find(checkpoint)
    if where is None:
        return None
    draft: Draft = getattr(module, name).load(checkpoint, where, target, dtype)
    return draft
