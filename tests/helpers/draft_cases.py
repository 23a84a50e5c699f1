"""What drafts, with the model that it drafts for: every golden draft beside its target, and scripts for any model."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import mlx.core as mx

from arriero.model.architectures import load_model
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Batch, Draft, Model, Pick
from arriero.model.drafts import load_draft, load_head
from arriero.runner.engine import Engine
from arriero.runner.messages import SamplingOptions
from arriero.source import FolderSource
from tests.helpers.drafts import GOLDENS, TARGETS, draft_checkpoint, target_of, with_head
from tests.helpers.engine_runs import GREEDY, plain_loop
from tests.helpers.speculation import PATTERNS, Pattern, speculating

DRAFTS = sorted(
    folder.name
    for folder in GOLDENS.iterdir()
    if (folder / "golden.npz").is_file() and "target" in draft_checkpoint(folder.name).config
)
KINDS = ["mtp_qwen3_5", "mtp_qwen4_exp", "assistant_e2b", "dflash_mixed", "dflash2"]
"""One of each kind."""
ARCHITECTURES = sorted(folder.name for folder in TARGETS.iterdir() if (folder / "config.json").is_file())

Replies = Mapping[tuple[int, ...], Sequence[int]]


@cache
def pair(name: str) -> tuple[Model, Draft]:
    """A golden draft and its target, in float32."""
    target = target_of(name)
    if name.startswith("mtp"):
        head = load_head(with_head(name).typed(), target, mx.float32)
        assert head is not None
        return target, head
    return target, load_draft(draft_checkpoint(name).typed(), target, mx.float32)


@cache
def model_of(name: str) -> Model:
    """The target of a golden draft, or a golden model."""
    if name in DRAFTS:
        return pair(name)[0]
    return load_model(Checkpoint.open(FolderSource(str(TARGETS / name))), mx.float32)


class Prompted:
    """A draft that does all its work and then proposes the known replies of prompts, but where a pattern is wrong."""

    def __init__(self, draft: Draft, replies: Replies, pattern: Pattern) -> None:
        self.draft, self.facts = draft, draft.facts
        self.replies, self.pattern = replies, pattern
        self.vocab = draft.target.facts.vocab_size  # type: ignore[attr-defined]
        self.engine: Engine | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.draft, name)

    def propose(self, batch: Batch, states: mx.array, anchor: mx.array, count: int, pick: Pick) -> mx.array:
        found = self.draft.propose(batch, states, anchor, count, pick)
        assert self.engine is not None
        row = self.engine._rows[0]
        coming = list(enumerate(self.replies.get(tuple(row.prompt.tolist()), ())))[len(row.outputs) :][:count]
        said = [t if self.pattern(i) else (t + 1) % self.vocab for i, t in coming]
        # What it found itself is computed too, and stands behind the end of what is known.
        return mx.concatenate([mx.array(said, mx.int32) + 0 * found[: len(said)], found[len(said) :]])


def drafting(name: str, replies: Replies, pattern: str = "random", **options: Any) -> Engine:
    """An engine in which the named draft, or none beside the named model, proposes by script."""
    if name not in DRAFTS:
        return speculating(model_of(name), replies=dict(replies), pattern=PATTERNS[pattern], **options)
    model, draft = pair(name)
    scripted = Prompted(draft, replies, PATTERNS[pattern])
    scripted.engine = speculating(model, draft=scripted, **options)
    return scripted.engine


def prompt_for(name: str, length: int = 11, seed: int = 0) -> list[int]:
    """Some tokens."""
    rng = random.Random(f"{length} {seed}")
    return [rng.randrange(model_of(name).facts.vocab_size) for _ in range(length)]


@cache
def _plain(name: str, prompt: tuple[int, ...], count: int, sampling: SamplingOptions) -> list[int]:
    return plain_loop(model_of(name), prompt, count, sampling)


def plain(name: str, prompt: Sequence[int], count: int, sampling: SamplingOptions = GREEDY) -> list[int]:
    """What the plainest loop says."""
    return list(_plain(name, tuple(prompt), count, sampling))
