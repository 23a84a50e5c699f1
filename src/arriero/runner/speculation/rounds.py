"""One round of one row: the target judges the drafts in one forward, and goes back behind the last that stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from arriero.model.contract import Batch, Cache, Hidden, Model, Span
from arriero.runner.caches.linear import LinearCache
from arriero.runner.messages import TokenLogprob
from arriero.runner.row import Row
from arriero.runner.sampling import Sampler
from arriero.runner.speculation.verify import Proposal, Rule, Verdict, verify


@dataclass(frozen=True, slots=True)
class Run:
    """The tokens that a round added to a row, and how its drafts did."""

    tokens: list[int]
    """At least one; ends with the stop token if there is one."""
    logprobs: list[TokenLogprob | None] | None
    drafted: int
    accepted: int
    judged: int
    """Drafts that were looked at: those behind an accepted stop token were not."""
    states: mx.array | None
    """The target's states of the positions that stayed, for the draft."""


def keeps_states(cache: Cache | None) -> bool:
    """Whether a cache can only go back to a state that was captured; those of keys and values go back by themselves."""
    return cache is not None and not isinstance(cache, LinearCache)


def run_round(
    model: Model,
    sampler: Sampler,
    row: Row,
    proposal: Proposal,
    rule: Rule,
    taps: Sequence[int] = (),
    *,
    states: bool,
) -> Run:
    """Judge a proposal behind the row's last token, which the host knows, and commit what stays.

    One forward of the target and one wait. Afterwards the row's caches hold everything but the last token of the run.
    `states`: a draft wants them.
    """
    start, drafted = row.position, len(proposal)
    captured = [cache for cache in row.caches if keeps_states(cache)]
    for cache in captured:
        assert cache is not None
        cache.plan(range(start + 1, start + drafted + 1))
    hidden = model.forward(_batch(row, proposal, taps))
    verdict = verify(sampler, row.id, model.logits(hidden.final), proposal, rule)
    told = states_of(hidden, taps) if states else None
    _wait(verdict, told, captured)

    accepted = int(np.array(verdict.accepted))
    tokens = verdict.emitted.read_tokens()[: accepted + 1]
    stop = next((i for i, token in enumerate(tokens) if token in row.stop_ids), None)
    kept, judged = accepted, drafted
    if stop is not None and stop < accepted:
        # What stands behind the stop token was never said, and the next prompt may not hold the token itself.
        tokens, kept, accepted, judged = tokens[: stop + 1], stop, stop + 1, stop + 1
    elif proposal.ends and accepted == drafted:
        tokens, kept = tokens[:drafted], drafted - 1
    logprobs = verdict.emitted.read_logprobs()
    _go_back(row.caches, start + 1 + kept, kept, drafted)
    row.position = start + 1 + kept
    if rule is Rule.SAME:
        sampler.skip(row.id, len(tokens))
    sampler.commit(row.id, mx.array(tokens, mx.int32))
    told = None if told is None else told[: kept + 1]
    return Run(tokens, logprobs and logprobs[: len(tokens)], drafted, accepted, judged, told)


def states_of(hidden: Hidden, taps: Sequence[int]) -> mx.array:
    """What a draft takes of a forward, `[T, width]`."""
    if not taps:
        return hidden.for_head
    assert hidden.taps is not None
    return hidden.taps


def _batch(row: Row, proposal: Proposal, taps: Sequence[int]) -> Batch:
    """The row's last token and the drafts."""
    span = Span(0, len(proposal) + 1, row.position, row.caches, row.layout)
    if proposal.host is not None:
        batch = Batch.of(np.array([row.next_token, *proposal.host], np.int32), [span])
    else:
        batch = Batch(mx.concatenate([mx.array([row.next_token], mx.int32), proposal.tokens]), [span])
    batch.taps = taps
    if row.images is not None:
        batch.features = row.images.features(span.position, span.length, 0)
    return batch


def _wait(verdict: Verdict, states: mx.array | None, captured: Sequence[Cache | None]) -> None:
    """The round's one wait: for the verdict, and for the states that no logit depends on."""
    arrays = verdict.arrays()
    if states is not None:
        arrays.append(states)
    arrays += [array for cache in captured if cache is not None for array in cache.state()]
    mx.eval(arrays)


def _go_back(caches: Sequence[Cache | None], offset: int, kept: int, drafted: int) -> None:
    """Every cache to `offset`, behind the anchor and `kept` drafts; what was captured elsewhere is let go first."""
    for cache in caches:
        if cache is None:
            continue
        captures = cache.take() if keeps_states(cache) else []
        if kept == drafted:
            continue
        snapshot = captures[kept] if captures else None
        captures.clear()
        if not cache.rewind(offset, snapshot):
            raise RuntimeError(f"a {type(cache).__name__} at {cache.offset} can't go back to {offset} after a round")
