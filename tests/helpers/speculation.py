"""Drafts that stay by a script, depths by a script, and engines with them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import numpy as np

from arriero.runner.engine import Engine, Limits
from arriero.runner.sampling import Sampler
from arriero.runner.speculation.speculator import Speculator

Pattern = Callable[[int], bool]
"""Whether the draft of the i-th token of a reply is right."""

PATTERNS: dict[str, Pattern] = {
    "always": lambda i: True,
    "never": lambda i: False,
    "alternating": lambda i: i % 3 < 2,
    "random": lambda i: random.Random(i).random() < 0.7,
}


class Widths:
    """Depths by a script, again and again, whatever is observed."""

    def __init__(self, *depths: int) -> None:
        self._depths = cycle(depths)
        self.observed: list[tuple[int, int, int, int]] = []
        self.begun = 0

    def begin(self) -> None:
        self.begun += 1

    def next(self, most: int) -> int:
        return min(next(self._depths), most)

    def rest(self) -> int:
        return 0

    def observe(self, drafted: int, accepted: int, judged: int, produced: int, seconds: float) -> None:
        self.observed.append((drafted, accepted, judged, produced))


class Scripted:
    """Drafts the known replies of prompts, but for tokens that a pattern makes wrong."""

    def __init__(self, replies: dict[tuple[int, ...], Sequence[int]], pattern: Pattern, vocab: int) -> None:
        self._replies = replies
        self._pattern = pattern
        self._vocab = vocab
        self._tokens: list[int] = []

    @property
    def held(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: np.ndarray) -> None:
        self._tokens += tokens.tolist()

    def find(self, most: int) -> list[int]:
        for prompt, reply in self._replies.items():
            if tuple(self._tokens[: len(prompt)]) == prompt:
                at = len(self._tokens) - len(prompt)
                coming = list(enumerate(reply))[at : at + most]
                return [t if self._pattern(i) else (t + 1) % self._vocab for i, t in coming]
        return []


def speculating(
    model: Any,
    *,
    replies: dict[tuple[int, ...], Sequence[int]] | None = None,
    pattern: Pattern = PATTERNS["always"],
    widths: Sequence[int] = (4,),
    ahead: bool | None = None,
    draft: Any = None,
    cap: int = 0,
    **limits: int,
) -> Engine:
    """An engine that drafts by script, or with a draft, or copies where there are neither."""
    chosen = {"context_length": model.facts.context_length, **limits}
    vocab = model.facts.vocab_size
    sampler = Sampler(vocab, chosen["context_length"])
    copies = {} if replies is None else {"copies": lambda: Scripted(replies, pattern, vocab)}
    speculator = Speculator(model, sampler, draft, cap=cap, depths=Widths(*widths), **copies)
    return Engine(model, sampler, Limits(**chosen), ahead, None, speculator)
