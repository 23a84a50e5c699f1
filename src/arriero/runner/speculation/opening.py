"""Which draft a runner uses, and the speculation that its engine gets."""

from __future__ import annotations

import logging

import mlx.core as mx

from arriero.errors import LoadError
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Draft, Model
from arriero.model.drafts import load_draft, load_head
from arriero.runner.messages import RunnerConfig
from arriero.runner.sampling import Sampler
from arriero.runner.speculation.controller import Depths
from arriero.runner.speculation.speculator import Speculator, supports

log = logging.getLogger(__name__)

KINDS = ("auto", "off", "lookup", "draft")


def check_kind(name: str) -> str:
    """The kind of speculation that a setting names; LoadError for an unknown one."""
    if name not in ("", *KINDS):
        raise LoadError(f"the speculation '{name}' is not known; ARRIERO_SPECULATION can be {', '.join(KINDS)}")
    return name or "auto"


def open_draft(config: RunnerConfig, checkpoint: Checkpoint, target: Model, dtype: mx.Dtype) -> Draft | None:
    """The draft that a runner is configured with, else the one stored beside the model, else the model's own head.

    None where there is none or none is wanted. CheckpointError when it does not belong to the model, with both numbers;
    LoadError when one is asked for and there is none.
    """
    kind = check_kind(config.speculation)
    if kind in ("off", "lookup"):
        return None
    if config.draft is not None:
        own: Checkpoint | None = Checkpoint.open(config.draft)
    else:
        own = Checkpoint.open_draft(config.source)
    if own is not None:
        own.exact = checkpoint.exact
        draft: Draft | None = load_draft(own, target, dtype)
    else:
        draft = load_head(checkpoint, target, dtype)
    if draft is None and kind == "draft":
        raise LoadError(
            f"ARRIERO_SPECULATION is 'draft', but there is no draft for this {target.facts.architecture}: its "
            "checkpoint holds none, and none was given"
        )
    if draft is not None:
        log.info("%s drafts for %s", draft.facts.architecture, target.facts.architecture)
    return draft


def make_speculator(
    config: RunnerConfig, model: Model, sampler: Sampler, draft: Draft | None, depths: Depths | None = None
) -> Speculator | None:
    """What an engine with this sampler drafts with; None where it does not."""
    kind = check_kind(config.speculation)
    if kind == "off" or (draft is None and kind == "draft"):
        return None
    if not supports(model):
        if kind != "auto":
            log.warning("nothing is drafted: %s runs through another package", model.facts.architecture)
        return None
    return Speculator(model, sampler, draft, cap=config.draft_tokens, depths=depths)
