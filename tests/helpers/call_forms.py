"""A small vocabulary whose tags are tokens, or text, and replies drawn from a grammar over it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import groupby

import numpy as np

from arriero.chat.parsers.events import Event, Parser
from arriero.chat.parsers.guard import GuardedParser
from arriero.chat.tags import Tags
from arriero.runner.messages import Grammar, Vocabulary
from arriero.runner.sampling.constraint import Constraint, Phase
from arriero.runner.sampling.grammar import Grammars

PIECES = [b'{"', b'":', b'",', b"true", b"null", b"ab", b", ", b"10", b"\n\n"]
STOP = "<|stop|>"
ENDS = (b'"', b"}", b"]", b"\n", b"<")


class Words:
    """Bytes, a few longer pieces, and tags as tokens of their own."""

    def __init__(self, tags: Sequence[str] = ()) -> None:
        self.tags = [*dict.fromkeys(tags), STOP]
        self.tokens = [*(bytes((byte,)) for byte in range(256)), *PIECES, *(tag.encode() for tag in self.tags)]
        self._first = len(self.tokens) - len(self.tags)
        special = list(range(self._first, len(self.tokens)))
        self.grammars = Grammars(Vocabulary(tokens=self.tokens, special=special), len(self.tokens))

    def tag(self, text: str) -> int | None:
        """The token of a tag."""
        return self._first + self.tags.index(text) if text in self.tags else None

    def is_tag(self, token: int) -> bool:
        """Whether a token is one."""
        return token >= self._first

    def begin(self, grammar: Grammar) -> Constraint:
        """A row of that grammar that has begun."""
        made = Constraint(self.grammars, grammar, [len(self.tokens) - 1])
        made.start()
        return made

    def spell(self, text: str) -> list[int]:
        """Tokens of a text, its tags as tokens where they are ones."""
        found: list[int] = []
        while text:
            tag = next((tag for tag in self.tags if text.startswith(tag)), None)
            if tag is not None:
                found.append(self._first + self.tags.index(tag))
                text = text.removeprefix(tag)
            else:
                found += text[0].encode()
                text = text[1:]
        return found

    def draw(self, grammar: Grammar, seed: int, said: Sequence[int] = (), most: int = 2000) -> list[int] | None:
        """A reply by chance that begins with what was `said`, mostly in ASCII; None when it is longer than that.

        One that is free ends where it is free again.
        """
        chance, made = random.Random(seed), self.begin(grammar)
        tokens = list(said)
        for token in said:
            made.advance(token)
        while len(tokens) < most and not (grammar.kind == "free" and made.phase is Phase.FREE):
            ids = [] if made.complete else np.flatnonzero(made.allowed()).tolist()
            if made.complete or not ids:
                break
            # A random writer closes nothing: what ends a value is drawn as often as everything else together.
            ends = [
                token for token in ids if self.is_tag(token) or self.tokens[token] in (b'"', b"}", b"]", b"\n", b"<")
            ]
            plain = [token for token in ids if token >= 256 or 32 <= token < 127]
            token = chance.choice(ends if ends and chance.random() < 0.35 else plain or ids)
            if token == len(self.tokens) - 1:
                break
            tokens.append(token)
            made.advance(token)
        return tokens if len(tokens) < most else None

    def pieces(self, tokens: Sequence[int]) -> list[tuple[str, bool]]:
        """The text, and whether it is a tag: tags for themselves, what stands between them in one piece."""
        groups = groupby(tokens, lambda token: token if self.is_tag(token) else -1)
        return [
            (b"".join(self.tokens[token] for token in group).decode("utf-8", "replace"), key >= 0)
            for key, group in groups
        ]


def events_of(parser: Parser, tags: Sequence[str], pieces: Sequence[tuple[str, bool]]) -> list[Event]:
    """What a parser makes of a reply whose `tags` are tokens."""
    guarded = GuardedParser(parser, Tags(tags))
    return [*(event for text, tag in pieces for event in guarded.feed(text, tag)), *guarded.flush()]
