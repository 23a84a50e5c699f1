"""Layers past the last: heads that predict several tokens, which checkpoints number as layers of the model."""

from __future__ import annotations

import logging
import re

from arriero.model.checkpoint import Checkpoint

log = logging.getLogger(__name__)


def draft_layers(checkpoint: Checkpoint, architecture: str, layers: int, declared: int) -> re.Pattern[str] | None:
    """Which tensors belong to the `declared` layers behind the `layers` of the model; says that they are not loaded.

    None when the configuration declares none: what is there nevertheless is then reported as unused.
    """
    if not declared:
        return None
    numbers = "|".join(str(index) for index in range(layers, layers + declared))
    pattern = re.compile(rf"(^|\.)(layers|blk)\.({numbers})\.")
    count = sum(pattern.search(name) is not None for name in checkpoint.names())
    if count:
        log.info(
            "%s: the %d layers that predict several tokens are not loaded: drafts are not in this version (%d tensors)",
            architecture,
            declared,
            count,
        )
    return pattern
