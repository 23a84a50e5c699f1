"""What of a proposal a grammar lets be judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import mlx.core as mx
import numpy as np

from arriero.runner.speculation.verify import Proposal, Rule


class LooksAhead(Protocol):
    """A row's grammar, `sampling.constraint.Constraint`."""

    def ahead(self, drafts: Sequence[int]) -> list[np.ndarray]:
        """What may come next, and behind each of `drafts` that may stand there, bool `[vocab]` each."""
        ...


def within(grammar: LooksAhead, proposal: Proposal, rule: Rule) -> Proposal | None:
    """The drafts that are worth judging, with what is allowed at each place; None where the reply can't go on.

    The host must know drafts for that, so those of a draft model are waited for first. The first draft that may not
    stand is left out, but not where drafts are judged by ratio: which draft was drawn decides there what may follow, so
    it is judged, has no chance, and is replaced from what is left of the target's law. To draw afresh in its place
    would say too often what the draft likes. The same holds of a draft that ends the reply.
    """
    host = np.array(proposal.tokens).tolist() if proposal.host is None else proposal.host
    masks = grammar.ahead(host)
    count, ends = len(masks) - 1, False
    if rule is Rule.RATIO and 0 < len(masks) <= len(host):
        ends = bool(masks[count][host[count]])
        # The line behind that draft is never drawn from.
        masks.append(np.ones_like(masks[0]))
        count += 1
    if count < 1:
        return None
    law = None if proposal.law is None else proposal.law[:count]
    return replace(
        proposal,
        tokens=proposal.tokens[:count],
        law=law,
        host=host[:count],
        allowed=mx.array(np.stack(masks)),
        ends=ends,
    )
