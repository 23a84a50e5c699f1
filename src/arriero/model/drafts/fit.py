"""Whether a draft and a target belong together, found out at load."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import mlx.core as mx

from arriero.errors import CheckpointError, UnsupportedFeature
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Model
from arriero.model.layers.decoder import HARMLESS


def expect_support(target: Model) -> None:
    """CheckpointError when a model gives drafts no token rows or bare logits, or of other shapes than its own facts.

    Nothing is computed for it.
    """
    facts = target.facts
    try:
        rows = target.embed(mx.zeros((1,), mx.int32))
        logits = target.raw_logits(mx.zeros((1, facts.hidden_size), facts.dtype))
    except UnsupportedFeature as error:
        raise CheckpointError(f"{facts.architecture} takes no draft: {error}") from error
    expect_same("the width of a token's row", facts.hidden_size, rows.shape[-1])
    expect_same("the number of logits", facts.vocab_size, logits.shape[-1])


def expect_same(what: str, draft: object, target: object) -> None:
    """CheckpointError with both values when they differ."""
    if draft != target:
        raise CheckpointError(
            f"the draft does not belong to this model: {what} is {draft} in the draft's configuration and {target} in "
            "the model; use the draft that was made for it"
        )


def expect_token(what: str, token: int, target: Model) -> None:
    """CheckpointError when a token id is not in the target's table."""
    if not 0 <= token < target.facts.vocab_size:
        raise CheckpointError(
            f"the draft does not belong to this model: {what} is {token}, but the model's table of tokens has "
            f"{target.facts.vocab_size} rows"
        )


def expect_taps(taps: Sequence[int], target: Model) -> None:
    """CheckpointError when layers are asked for that the target does not have, or whose order is not theirs."""
    layers = target.facts.layers
    if any(not 0 <= tap < layers for tap in taps):
        raise CheckpointError(
            f"the draft does not belong to this model: it takes the outputs of layers {list(taps)}, but the model has "
            f"layers 0 to {layers - 1}"
        )
    if not taps or any(later <= earlier for earlier, later in pairwise(taps)):
        raise CheckpointError(f"the draft's target_layer_ids should be ascending layer numbers, found {list(taps)}")


def expect_taken(checkpoint: Checkpoint, architecture: str) -> None:
    """CheckpointError for a tensor of the draft that nobody has taken.

    Relatives of a draft load as it with the parts left out that make them good, and only propose badly.
    """
    left = [name for name in checkpoint.unused() if not HARMLESS.search(name)]
    if left:
        raise CheckpointError(
            f"the draft's checkpoint holds {len(left)} tensors that {architecture} does not have, the first is "
            f"{left[0]}: it is a draft of another kind"
        )
