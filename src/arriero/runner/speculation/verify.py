"""How drafts are judged: the leading ones that the target would have chosen stay, and one token of its own follows.

Source: Leviathan et al. (arXiv 2211.17192) and Chen et al. (arXiv 2302.01318) for the ratio rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import mlx.core as mx

from arriero.runner.messages import SamplingOptions
from arriero.runner.sampling import Distribution, Sampled, Sampler
from arriero.runner.sampling.transforms import COLDEST


class Rule(Enum):
    """What decides whether a draft stays."""

    BEST = "best"
    """Temperature 0: it is the target's best token."""
    SAME = "same"
    """The target draws at every position, with the numbers that its plain decoding would use, and the draft is that
    token. What comes out is plain decoding's text for that seed, whatever was drafted. Nothing is lost by it where
    drafts are not drawn by chance."""
    RATIO = "ratio"
    """Draft d stays with probability min(1, p(d) / q(d)); else a token is drawn from max(p − q, 0). The most that can
    stay of drafts drawn from q."""


def rule_for(options: SamplingOptions, *, drawn: bool) -> Rule:
    """The rule of a row; `drawn`: its drafts can be drawn by chance, with a known law."""
    if options.temperature < COLDEST:
        return Rule.BEST
    return Rule.RATIO if drawn and options.seed < 0 else Rule.SAME


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafts behind a row's last token."""

    tokens: mx.array
    """int32 `[d]`, d ≥ 1, lazy or not."""
    law: Distribution | None = None
    """What each was drawn from, `d` rows; None where none was drawn by chance."""
    host: list[int] | None = None
    """The tokens, where the host knows them."""
    allowed: mx.array | None = None
    """What a grammar lets stand at each place and behind the last, bool `[d + 1, vocab]`."""
    ends: bool = False
    """Whether the reply goes no further than the last draft: nothing is said behind it in this round."""

    def __len__(self) -> int:
        return int(self.tokens.shape[0])


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a round of d drafts adds, lazily."""

    accepted: mx.array
    """Number of drafts that stay, int32 scalar."""
    emitted: Sampled
    """`d + 1` tokens, of which the first `accepted + 1` hold: the drafts that stay and one more."""
    rule: Rule

    def arrays(self) -> list[mx.array]:
        """What to evaluate."""
        return [self.accepted, *self.emitted.arrays()]


def verify(sampler: Sampler, row: str, logits: mx.array, proposal: Proposal, rule: Rule) -> Verdict:
    """Judge drafts by the target's `logits` `[d + 1, vocab]` over the last token and the drafts; nothing is read.

    Every line is transformed as plain decoding would at its place: penalties see the drafts before it. The row's
    history stays, and so do its random numbers but for those of the ratio rule. ValueError for other numbers of lines.
    """
    drafts = proposal.tokens
    if logits.shape[0] != len(proposal) + 1:
        raise ValueError(f"{logits.shape[0]} lines of logits for {len(proposal)} drafts; one more is needed")
    target = sampler.distribution(row, logits, drafts, proposal.allowed)
    if rule is Rule.RATIO:
        if proposal.law is None:
            raise ValueError("drafts are judged by ratio, but nobody knows what they were drawn from")
        kept = sampler.accept(row, chances(target[: len(proposal)], proposal.law, drafts))
        accepted = leading(kept)
        others = sampler.draw(row, replacement(target, proposal.law))
        mine = mx.concatenate([drafts, others[-1:]])
        tokens = mx.where(mx.arange(logits.shape[0]) < accepted, mine, others)
    else:
        tokens = best(target) if rule is Rule.BEST else sampler.peek(row, target)
        accepted = leading(tokens[:-1] == drafts)
    return Verdict(accepted, sampler.described(row, logits, tokens), rule)


def best(source: Distribution) -> mx.array:
    """The tokens `[n]` of a greedy distribution."""
    assert source.ids is not None
    return source.ids[:, 0].astype(mx.int32)


def leading(kept: mx.array) -> mx.array:
    """How many flags `[d]` are true before the first that is not, int32 scalar."""
    return mx.sum(mx.cumprod(kept.astype(mx.int32)))


def chances(target: Distribution, law: Distribution, drafts: mx.array) -> mx.array:
    """`p(d) / q(d)` of each draft `[d]`; 1 and more = it stays. A draft that its law can't give does not stay."""
    drawn_with = law.probability_of(drafts)
    ratio = target.probability_of(drafts) / mx.maximum(drawn_with, 1e-38)
    return mx.where(drawn_with > 0, ratio, 0.0)


def replacement(target: Distribution, law: Distribution) -> Distribution:
    """What stands in for each draft if it is the first that does not stay, and what follows when all do: `d + 1` rows.

    Rounding may leave nothing of `max(p − q, 0)` where both agree; p stands there.
    """
    drafts = law.rows
    left = target[:drafts].residual(law)
    something = mx.sum(left.probs, axis=-1, keepdims=True) > 0
    probs = mx.concatenate([mx.where(something, left.probs, target.probs[:drafts]), target.probs[drafts:]])
    return Distribution(probs, target.ids, target.vocab_size)
