"""Grammars over one vocabulary: compiled, and asked what may come next, on threads of their own beside the forward."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import llguidance
import numpy as np
from llguidance import TokenizerWrapper

from arriero.errors import InvalidRequest
from arriero.grammar import Kind, limits, source, unusable
from arriero.runner.messages import Grammar, Vocabulary


class _Words:
    """A vocabulary as llguidance takes it. The last token is ours: the end of a reply, which no model can draw."""

    def __init__(self, tokens: list[bytes], special: list[int]) -> None:
        self.tokens = [*tokens, b"<end>"]
        self.bos_token_id = None
        self.eos_token_id = len(tokens)
        self.special_token_ids = [*special, self.eos_token_id]
        self._bytes = {data[0]: index for index, data in enumerate(tokens) if len(data) == 1}

    def __call__(self, text: bytes) -> list[int]:
        """A text byte by byte. Asked only for what a grammar forces, where it is told to; ours are not."""
        return [self._bytes[byte] for byte in text if byte in self._bytes]


@dataclass(frozen=True, slots=True)
class Compiled:
    """The matchers of a grammar at their beginnings; one follows a copy."""

    whole: Any
    """Of the reply; None where that is free."""
    triggers: list[Any]


class Grammars:
    """Compiles grammars over one vocabulary. Its two threads never touch an array of MLX."""

    def __init__(self, vocabulary: Vocabulary, size: int) -> None:
        """`size` is the number of logits; ids that the vocabulary does not name are never allowed."""
        self.size = size
        self._compiling = ThreadPoolExecutor(1, "grammars")
        self._following = ThreadPoolExecutor(1, "masks")
        tokens = [*vocabulary.tokens[:size], *[b""] * (size - len(vocabulary.tokens))]
        special = [index for index in vocabulary.special if index < size]
        self.tokens = tokens
        self._special = frozenset(special)
        self._ids: dict[bytes, list[int]] = {}
        self._tokenizer: Future[Any] = self._compiling.submit(self._read, tokens, special)

    def _read(self, tokens: list[bytes], special: list[int]) -> Any:
        for index, data in enumerate(tokens):
            self._ids.setdefault(data, []).append(index)
        return llguidance.LLTokenizer(
            TokenizerWrapper(_Words(tokens, special)), n_vocab=len(tokens) + 1, eos_token=[len(tokens)]
        )

    def compile(self, grammar: Grammar) -> Future[Compiled]:
        """The future raises InvalidRequest for a grammar that can't be used."""
        return self._compiling.submit(self._compiled, grammar)

    def _compiled(self, grammar: Grammar) -> Compiled:
        whole = None if grammar.kind == "free" else self._matcher(grammar.kind, grammar.text)
        return Compiled(whole, [self._matcher("lark", trigger.lark) for trigger in grammar.triggers])

    def _matcher(self, kind: Kind, text: str) -> Any:
        matcher = llguidance.LLMatcher(self._tokenizer.result(), source(kind, text), log_level=0, limits=limits())
        if matcher.is_error():
            raise unusable(kind, matcher.get_error())
        return matcher

    def mask(self, matcher: Any) -> Future[np.ndarray]:
        """What may come next, bool `[size + 1]`: the last one says that the reply may end."""
        return self._following.submit(self._masked, matcher)

    def _masked(self, matcher: Any) -> np.ndarray:
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            raise stuck(matcher.get_error())
        return np.unpackbits(bits, count=self.size + 1, bitorder="little").view(bool)

    def spelled(self, data: bytes) -> list[int]:
        """The tokens of exactly these bytes: the special ones alone where there are such."""
        ids = self._ids.get(data, [])
        return [index for index in ids if index in self._special] or ids

    def is_tag(self, data: bytes) -> bool:
        """Whether a special token has exactly these bytes: then no others spell it."""
        return any(index in self._special for index in self._ids.get(data, ()))

    def marked(self, token: int) -> bytes:
        """A token's bytes as triggers look for them: a byte 255 stands before those of a special one."""
        return b"\xff" + self.tokens[token] if token in self._special else self.tokens[token]

    def close(self) -> None:
        """End the threads."""
        self._compiling.shutdown(wait=False, cancel_futures=True)
        self._following.shutdown(wait=False, cancel_futures=True)


def stuck(why: str) -> InvalidRequest:
    """The error for a reply that can't go on; llguidance says `NoExtension…` for a dead end."""
    why = why.partition("\n")[0]
    if not why or why.startswith("NoExtension"):
        why = "no token of this model continues it; change the grammar"
    return InvalidRequest(f"the reply can't go on in its grammar: {why}")
