"""What a row's grammar lets it say next: one bit a token, computed on a thread of its own beside the forward."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum
from typing import Any

import llguidance
import numpy as np
from llguidance import TokenizerWrapper

from arriero.errors import ArrieroError, InvalidRequest
from arriero.grammar import limits, source, unusable
from arriero.runner.messages import Grammar, Vocabulary

BREAKS = (b"\n", b"\n\n")
"""What models are used to write behind their thoughts; it is no part of the reply."""


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
        self._ids: dict[bytes, list[int]] = {}
        self._tokenizer: Future[Any] = self._compiling.submit(self._read, tokens, special)

    def _read(self, tokens: list[bytes], special: list[int]) -> Any:
        for index, data in enumerate(tokens):
            self._ids.setdefault(data, []).append(index)
        return llguidance.LLTokenizer(
            TokenizerWrapper(_Words(tokens, special)), n_vocab=len(tokens) + 1, eos_token=[len(tokens)]
        )

    def begin(self, grammar: Grammar, stop_ids: Iterable[int]) -> Constraint:
        """A row's constraint, whose grammar is compiled meanwhile; it is `ready` when that is done."""
        return Constraint(self, grammar, stop_ids)

    def compile(self, grammar: Grammar) -> Future[Any]:
        """A matcher; the future raises InvalidRequest for a grammar that can't be used."""
        return self._compiling.submit(self._compiled, grammar)

    def _compiled(self, grammar: Grammar) -> Any:
        matcher = llguidance.LLMatcher(
            self._tokenizer.result(), source(grammar.kind, grammar.text), log_level=0, limits=limits()
        )
        if matcher.is_error():
            raise unusable(grammar.kind, matcher.get_error())
        return matcher

    def mask(self, matcher: Any) -> Future[np.ndarray]:
        """What may come next, bool `[size + 1]`: the last one says that the reply may end."""
        return self._following.submit(self._masked, matcher)

    def _masked(self, matcher: Any) -> np.ndarray:
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            raise _stuck(matcher.get_error())
        return np.unpackbits(bits, count=self.size + 1, bitorder="little").view(bool)

    def spelled(self, data: bytes) -> list[int]:
        """The tokens of exactly these bytes."""
        return self._ids.get(data, [])

    def close(self) -> None:
        """End the threads."""
        self._compiling.shutdown(wait=False, cancel_futures=True)
        self._following.shutdown(wait=False, cancel_futures=True)


TAIL = 160
"""Bytes of thoughts that are kept to find what closes them."""


class Phase(Enum):
    """Where a reply stands."""

    START = "start"
    """Nothing was said: it may begin to think, or with a call, or with what the grammar says."""
    OPENING = "opening"
    """Within the tag that opens thoughts or a call."""
    THINKING = "thinking"
    """Free, but for its end."""
    BEHIND = "behind"
    """Thoughts have just ended: a line break or a call may follow."""
    GRAMMAR = "grammar"
    FREE = "free"
    """A call."""
    COMPLETE = "complete"


class Constraint:
    """One row's grammar and how far its reply has got. For the array thread alone.

    For every token: `allowed` before it is drawn, `advance` when it is known. In between, the next mask is computed on
    another thread.
    """

    def __init__(self, grammars: Grammars, grammar: Grammar, stop_ids: Iterable[int]) -> None:
        self._grammars = grammars
        self._compiling = grammars.compile(grammar)
        self._matcher: Any = None
        self._mask: Future[np.ndarray] | None = None
        self._stop_ids = np.array(sorted(index for index in stop_ids if index < grammars.size), np.int64)
        self._openings = {call: Phase.FREE for call in grammar.calls if call}
        """What may stand in the grammar's place, and what it leads to."""
        self._closing: re.Pattern[bytes] | None = None
        self._may_stop = grammar.calls_stop
        self._breaks: tuple[bytes, ...] = BREAKS
        self._said = b""
        """Of an opening tag; while it thinks, the last bytes, which what closes the thoughts may begin in."""
        self._error: ArrieroError | None = None
        self.phase = Phase.START
        if grammar.thoughts is not None:
            self._closing = re.compile(grammar.thoughts.closing.encode())
            if grammar.thoughts.opened:
                self.phase = Phase.THINKING
            elif grammar.thoughts.opening:
                self._openings[grammar.thoughts.opening] = Phase.THINKING

    @property
    def ready(self) -> bool:
        """Whether the grammar has been compiled, or refused."""
        return self._compiling.done()

    @property
    def complete(self) -> bool:
        """Whether the reply is whole and nothing more can follow."""
        return self.phase is Phase.COMPLETE

    def wait(self, seconds: float) -> None:
        """Wait so long for the compiler, and no longer."""
        try:
            self._compiling.exception(seconds)
        except TimeoutError:
            return

    def start(self) -> None:
        """Begin; InvalidRequest for a grammar that can't be used."""
        self._matcher = self._compiling.result()
        self._follow()

    def advance(self, token: int) -> None:
        """A token of the reply is known."""
        data = self._grammars.tokens[token]
        if self.phase is Phase.FREE:
            return
        if self.phase is Phase.THINKING:
            self._think(data)
        elif self.phase is Phase.OPENING:
            self._open(data)
        elif self.phase in (Phase.START, Phase.BEHIND) and not self._taken(token):
            if self.phase is Phase.BEHIND and data in self._breaks:
                self._breaks = ()
            else:
                self._open(data)
        else:
            self._consume([token])

    def allowed(self) -> np.ndarray:
        """The tokens that may come next, bool `[size]`, at least one; waits for the other thread.

        InvalidRequest when the grammar is at a dead end: nothing may follow, and the reply isn't whole. A reply that is
        whole and can only end becomes `complete` instead, and what is returned allows nothing.
        """
        if self._error is not None:
            raise self._error
        if self.phase in (Phase.THINKING, Phase.FREE):
            mask = np.ones(self._grammars.size, bool)
            mask[self._stop_ids] = self.phase is Phase.FREE or self._may_stop
            return mask
        if self.phase is Phase.OPENING:
            mask = np.zeros(self._grammars.size, bool)
            self._allow_opening(mask)
            return mask
        return self._in_grammar()

    def ahead(self, drafts: Sequence[int]) -> list[np.ndarray]:
        """What may come next, and behind each of `drafts` that may stand there: bool `[size]` each, nothing changes.

        As many and one more as drafts are worth judging: the reply goes on behind each of them. Empty where it can't go
        on at all, which `allowed` says.
        """
        if self._mask is not None:
            self._mask.exception()  # waits: the matcher is the other thread's until then
        walker = copy.copy(self)
        walker._matcher = self._matcher.deep_copy()
        masks: list[np.ndarray] = []
        for draft in drafts:
            mask = walker._next()
            if mask is None:
                return masks
            masks.append(mask)
            if not mask[draft]:
                return masks
            walker.advance(draft)
        last = walker._next()
        return masks if last is None else [*masks, last]

    def _next(self) -> np.ndarray | None:
        """What may come next; None where nothing can."""
        try:
            mask = None if self.complete else self.allowed()
        except ArrieroError:
            return None
        return None if self.complete else mask

    def _in_grammar(self) -> np.ndarray:
        assert self._mask is not None
        whole = self._mask.result()
        mask, may_end = whole[:-1].copy(), bool(whole[-1]) and bool(self._matcher.is_accepting())
        mask[self._stop_ids] = False
        if self.phase in (Phase.START, Phase.BEHIND):
            self._allow_opening(mask)
        if self.phase is Phase.BEHIND:
            for line_break in self._breaks:
                mask[self._grammars.spelled(line_break)] = True
        if not mask.any():
            if not may_end:
                raise _stuck("")
            self.phase = Phase.COMPLETE
        mask[self._stop_ids] = may_end
        return mask

    def _follow(self) -> None:
        """Have the next mask computed."""
        self._mask = self._grammars.mask(self._matcher)

    def _taken(self, token: int) -> bool:
        """Whether the grammar itself lets a token come next."""
        assert self._mask is not None
        return bool(self._mask.result()[token])

    def _consume(self, tokens: list[int]) -> None:
        self.phase = Phase.GRAMMAR
        if self._mask is not None:
            self._mask.exception()  # waits: the matcher is the other thread's until then
            self._mask = None
        if not self._matcher.consume_tokens(tokens):
            self._error = _stuck(self._matcher.get_error())
        elif self._matcher.is_stopped():
            self.phase = Phase.COMPLETE
        else:
            self._follow()

    def _allow_opening(self, mask: np.ndarray) -> None:
        """The tokens that what is left of an opening tag may begin with."""
        for opening in self._openings:
            if opening.startswith(self._said):
                rest = opening[len(self._said) :]
                for length in range(1, len(rest) + 1):
                    mask[self._grammars.spelled(rest[:length])] = True

    def _open(self, data: bytes) -> None:
        self._said += data
        self.phase = self._openings.get(self._said, Phase.OPENING)
        if self.phase is not Phase.OPENING:
            self._said = b""

    def _think(self, data: bytes) -> None:
        """Look for the end of thoughts; what a token holds behind it is the grammar's, but for blanks."""
        assert self._closing is not None
        text = self._said + data
        found = self._closing.search(text)
        if found is None:
            self._said = text[-TAIL:]
            return
        self._said = b""
        self._openings = {opening: phase for opening, phase in self._openings.items() if phase is Phase.FREE}
        self.phase = Phase.BEHIND
        rest = text[found.end() :].lstrip()
        if not rest:
            return
        spelled = [self._grammars.spelled(bytes((byte,))) for byte in rest]
        if not all(spelled):
            self._error = _stuck("a token of the thoughts reaches into it")
            return
        self._consume([ids[0] for ids in spelled])


def _stuck(why: str) -> InvalidRequest:
    """The error for a reply that can't go on; llguidance says `NoExtension…` for a dead end."""
    why = why.partition("\n")[0]
    if not why or why.startswith("NoExtension"):
        why = "no token of this model continues it; change the grammar"
    return InvalidRequest(f"the reply can't go on in its grammar: {why}")
