"""What a row's grammar lets it say next: free thoughts, the reply in its grammar, calls whose arguments have one."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from enum import Enum
from typing import Any

import numpy as np

from arriero.errors import ArrieroError
from arriero.runner.messages import Grammar
from arriero.runner.sampling.grammar import Compiled, Grammars, stuck

BREAKS = (b"\n", b"\n\n")
"""What models are used to write behind their thoughts; it is no part of the reply."""
TAIL = 320
"""Bytes of free text that are kept to find what ends it."""
_CUT = b"\xfe"
"""Stands where the beginning of free text is no longer kept."""


class Phase(Enum):
    """Where a reply stands."""

    START = "start"
    """Nothing was said: it may begin to think, or with a call, or with what the grammar says."""
    OPENING = "opening"
    """Within the tag that opens thoughts or a call."""
    THINKING = "thinking"
    """Free, but for its end and for triggers that hold there."""
    BEHIND = "behind"
    """Thoughts have just ended: a line break or a call may follow."""
    GRAMMAR = "grammar"
    FREE = "free"
    """A call, or a reply without a grammar: triggers hold."""
    COMPLETE = "complete"


class Constraint:
    """One row's grammar and how far its reply has got. For the array thread alone.

    For every token: `allowed` before it is drawn, `advance` when it is known. In between, the next mask is computed on
    another thread.
    """

    def __init__(self, grammars: Grammars, grammar: Grammar, stop_ids: Iterable[int]) -> None:
        self._grammars = grammars
        self._compiling = grammars.compile(grammar)
        self._compiled: Compiled | None = None
        self._matcher: Any = None
        self._mask: Future[np.ndarray] | None = None
        self._stop_ids = np.array(sorted(index for index in stop_ids if index < grammars.size), np.int64)
        self._triggers = grammar.triggers
        self._free = grammar.kind == "free"
        self._openings = {call: Phase.FREE for call in grammar.calls if call}
        """What may stand in the grammar's place, and what it leads to."""
        self._may_stop = grammar.calls_stop or self._free
        self._breaks: tuple[bytes, ...] = BREAKS
        self._said = b""
        """Of an opening tag; while the reply is free, the last bytes, which what ends that may begin in."""
        self._error: ArrieroError | None = None
        self._back = Phase.COMPLETE
        """What follows the grammar that is being followed."""
        self.phase = Phase.FREE if self._free else Phase.START
        closing = opening = None
        if grammar.thoughts is not None:
            closing = grammar.thoughts.closing
            if grammar.thoughts.opened:
                self.phase = Phase.THINKING
            elif grammar.thoughts.opening:
                self._openings[grammar.thoughts.opening] = Phase.THINKING
                opening = rf"\A\s*\xff?{re.escape(grammar.thoughts.opening.decode())}"
        self._ends = {
            Phase.THINKING: self._search(closing, in_thoughts=True),
            Phase.FREE: self._search(opening if self._free else None, in_thoughts=False),
        }

    def _search(self, end: str | None, *, in_thoughts: bool) -> re.Pattern[bytes] | None:
        """What ends free text: the group `end` always, `t0` and so on by a trigger; None = nothing does."""
        patterns = [] if end is None else [rf"(?P<end>{end})"]
        patterns += [
            f"(?P<t{index}>{trigger.pattern})"
            for index, trigger in enumerate(self._triggers)
            if trigger.in_thoughts or not in_thoughts
        ]
        return re.compile("|".join(patterns).encode()) if patterns else None

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
        self._compiled = self._compiling.result()
        if self._compiled.whole is not None:
            self._matcher = self._compiled.whole
            self._follow()

    def advance(self, token: int) -> None:
        """A token of the reply is known."""
        data = self._grammars.tokens[token]
        if self.phase in (Phase.FREE, Phase.THINKING):
            self._listen(self._grammars.marked(token))
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
        walker._matcher = None if self._matcher is None else self._matcher.deep_copy()
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
                raise stuck("")
            self._end()
            if not self.complete:
                return self.allowed()
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
            self._error = stuck(self._matcher.get_error())
        elif self._matcher.is_stopped():
            self._end()
        else:
            self._follow()

    def _spell(self, rest: bytes) -> None:
        """The grammar takes bytes that came in a token with what stands before it."""
        spelled = [self._grammars.spelled(bytes((byte,))) for byte in rest]
        if not all(spelled):
            self._error = stuck("a token reaches into it")
            return
        self._consume([ids[0] for ids in spelled])

    def _end(self) -> None:
        """The grammar that is being followed is done with."""
        self.phase, self._back = self._back, Phase.COMPLETE
        self._matcher = self._mask = None
        self._said = _CUT

    def _allow_opening(self, mask: np.ndarray) -> None:
        """The tokens that what is left of an opening tag may begin with."""
        for opening in self._openings:
            if not self._said and self._grammars.is_tag(opening):
                mask[self._grammars.spelled(opening)] = True
            elif opening.startswith(self._said):
                rest = opening[len(self._said) :]
                for length in range(1, len(rest) + 1):
                    mask[self._grammars.spelled(rest[:length])] = True

    def _open(self, data: bytes) -> None:
        self._said += data
        self.phase = self._openings.get(self._said, Phase.OPENING)
        if self.phase is not Phase.OPENING:
            opening, self._said = self._said, b""
            if self.phase is Phase.FREE:
                self._listen(b"\xff" + opening if self._grammars.is_tag(opening) else opening)

    def _listen(self, data: bytes) -> None:
        """Look for what ends free text; what a token holds behind that is a grammar's, but for blanks."""
        pattern = self._ends[self.phase]
        if pattern is None:
            return
        text = self._said + data
        found = pattern.search(text)
        if found is None:
            self._said = text if len(text) <= TAIL else _CUT + text[-TAIL:]
            return
        rest, self._said = text[found.end() :], b""
        groups = found.groupdict()
        trigger = next((index for index in range(len(self._triggers)) if groups.get(f"t{index}") is not None), None)
        if trigger is not None:
            self._begin(trigger, rest)
        elif self.phase is Phase.FREE:
            self.phase = Phase.THINKING
            self._listen(rest)
        else:
            self._thought(rest.lstrip())

    def _thought(self, rest: bytes) -> None:
        """Thoughts have ended."""
        if self._free:
            self.phase = Phase.FREE
            self._listen(rest)
            return
        self._openings = {opening: phase for opening, phase in self._openings.items() if phase is Phase.FREE}
        self.phase = Phase.BEHIND
        if rest:
            self._spell(rest)

    def _begin(self, trigger: int, rest: bytes) -> None:
        """A call has begun whose grammar is known."""
        assert self._compiled is not None
        self._back = Phase.COMPLETE if self._triggers[trigger].ends else self.phase
        self._matcher = self._compiled.triggers[trigger].deep_copy()
        self.phase = Phase.GRAMMAR
        if rest:
            self._spell(rest)
        else:
            self._follow()
