"""The machine that follows a reply: thinking between two tags, the answer, and calls in one family's syntax.

The rules, the same for every family:

- White space around tags and around calls belongs to nobody and is left out.
- A call that can't be read is content, to the character, with a warning; so is one whose end is missing.
- Inside thinking only a complete call to a tool on offer is one, and only when nothing but the end of thinking, another
  call or the end of the reply follows it: anything else is the model talking about calls. If the answer behind it makes
  a call, those inside thinking were drafts, and are thinking.
- Without tools on offer nothing is a call.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Literal

from arriero.chat.messages import Tool
from arriero.chat.parsers.events import Content, Event, Thinking, ToolCallEvent
from arriero.chat.parsers.marks import ThinkingTags, Thoughts, overlap, past_space, reach, reach_any, search
from arriero.chat.parsers.offered import OfferedTools
from arriero.chat.parsers.syntax import Done, Failed, Outcome, Reader, Syntax

log = logging.getLogger(__name__)

_FAILED = Failed()
_MOST_FAILURES = 64
"""Attempts at calls that may fail in one reply before no more are looked for: it bounds the time that they take."""

_State = Literal["start", "thinking", "after", "lead", "content", "call", "inner", "drafted"]


class ReplyParser:
    """One reply; `feed` and `flush` as `Parser` has them."""

    def __init__(
        self,
        prompt: str = "",
        *,
        tags: ThinkingTags | None = None,
        syntax: Syntax | None = None,
        tools: Iterable[Tool] = (),
        silent: Sequence[str] = (),
    ) -> None:
        """`prompt` is what was rendered: it may have opened the thinking, or opened and closed it.

        `silent` are tags that mean nothing by themselves and are left out of content.
        """
        self._tags = tags
        self._tools = OfferedTools(tools)
        self._syntax = syntax if self._tools else None
        self._silent = tuple(silent)
        self._openings: tuple[str, ...] = ()
        self._compile()
        self._text = ""
        self._looked = 0
        self._repeats = ""
        self._begun = self._answered = False
        self._reader: Reader | None = None
        self._opening_end = 0
        self._tagged = False
        self._failures = 0
        self._warned = False
        self._drafts: list[ToolCallEvent] = []
        self._made_call = False
        self._thought = False
        self._state: _State = self._first_state(prompt)
        self.thoughts: Thoughts | None = self._thoughts()
        """Where the reply may think before it answers."""

    @property
    def call_openings(self) -> tuple[str, ...]:
        """What calls begin with; none without tools on offer."""
        return self._openings

    @property
    def call_leads(self) -> tuple[str, ...]:
        """What calls begin with before anything else of the answer."""
        return self._syntax.leads if self._syntax is not None else ()

    def _thoughts(self) -> Thoughts | None:
        if self._tags is None or self._thought or (self._state == "lead" and not self._tags.anywhere):
            return None
        return Thoughts(self._tags.opening, self._tags.closing, self._state == "thinking")

    def feed(self, text: str) -> list[Event]:
        held, self._text = self._text, ""
        held += text  # a local name: CPython extends the string in place
        self._text = held
        events: list[Event] = []
        while self._advance(events):
            continue
        return events

    def flush(self) -> list[Event]:
        events: list[Event] = []
        while True:
            while self._advance(events):
                continue
            if self._state in ("call", "inner") and self._reader is not None:
                self._settle(self._reader.finish(self._text), events)
            else:
                break
        if self._state == "drafted":
            self._undraft(events, as_calls=True)
        held, self._text = self._text, ""
        if self._state == "thinking" and held and (self._begun or held.strip()):
            events.append(Thinking(held))
        elif self._state in ("start", "lead", "content") and held:
            events.append(Content(held))
        self._undraft(events, as_calls=not self._made_call)
        return events

    def _first_state(self, prompt: str) -> _State:
        if self._tags is None:
            return "lead"
        ending = prompt.rstrip()
        if ending.endswith(self._tags.closing):
            self._thought = True
            return "lead"
        if ending.endswith(self._tags.whole.rstrip()):
            self._repeats = self._tags.whole
            return "thinking"
        if ending.endswith(self._tags.opening):
            self._repeats = self._tags.label
            return "thinking"
        return "lead" if self._tags.anywhere else "start"

    def _compile(self) -> None:
        """What is looked for in content and in thinking."""
        tags = self._tags
        self._openings = self._syntax.openings if self._syntax is not None else ()
        thinking = (tags.opening,) if tags is not None and tags.anywhere else ()
        self._content_marks = (*self._openings, *thinking, *self._silent)
        self._thinking_marks = (tags.closing, *self._openings) if tags is not None else ()
        self._content_search = search(self._content_marks)
        self._thinking_search = search(self._thinking_marks)

    def _advance(self, events: list[Event]) -> bool:
        """One move of the machine; False when more text is needed."""
        if self._state == "start":
            return self._start()
        if self._state == "thinking":
            return self._think(events)
        if self._state == "after":
            return self._skip("lead")
        if self._state == "lead":
            return self._lead()
        if self._state == "content":
            return self._content(events)
        if self._state == "drafted":
            return self._drafted(events)
        assert self._reader is not None
        outcome = self._reader.read(self._text)
        if self._state == "inner":
            outcome = self._bounded(outcome)
        if outcome is None:
            return False
        self._settle(outcome, events)
        return True

    def _go(self, state: _State, start: int = 0) -> None:
        """Change state, the text before `start` being done with."""
        self._text = self._text[start:]
        self._looked = 0
        self._state = state

    def _skip(self, then: _State) -> bool:
        """White space; False when nothing else has come."""
        start = past_space(self._text, 0)
        if start == len(self._text):
            self._text = ""
            return False
        self._go(then, start)
        return True

    def _start(self) -> bool:
        """Thinking may begin here, and only here."""
        assert self._tags is not None
        at = past_space(self._text, 0)
        found = reach(self._text, at, self._tags.opening)
        if found:
            self._open(at + len(self._tags.opening))
            return True
        if found is None:
            return False
        self._state = "lead"
        return True

    def _lead(self) -> bool:
        """Nothing of the answer was seen: some calls begin only here."""
        at = past_space(self._text, 0)
        leads = self._syntax.leads if self._syntax is not None and not self._answered else ()
        found = reach_any(self._text, at, leads)
        if found is None:
            return False
        if isinstance(found, str):
            self._begin(found, 0, at + len(found), "call")
        else:
            self._state = "content"
        return True

    def _content(self, events: list[Event]) -> bool:
        if not self._text:
            return False
        if self._content_search is None:
            self._answer(self._text, events)
            self._text = ""
            return False
        found = self._content_search.search(self._text, self._looked)
        if found is None:
            self._let_go(Content, self._content_marks, events)
            return False
        mark = found[0]
        before = self._text[: found.start()]
        if mark in self._openings:
            self._answer(before.rstrip(), events)
            self._begin(mark, len(before.rstrip()), found.end(), "call")
            return True
        self._answer(before.rstrip(), events)
        if mark in self._silent:
            self._go("after", found.end())
        else:
            self._open(found.end())
        return True

    def _open(self, end: int) -> None:
        """Thinking begins behind its tag; a second tag inside is part of it."""
        assert self._tags is not None
        self._repeats, self._begun = self._tags.label, False
        self._go("thinking", end)

    def _think(self, events: list[Event]) -> bool:
        assert self._tags is not None
        assert self._thinking_search is not None
        if not self._begun and not self._begin_thinking():
            return False
        found = self._thinking_search.search(self._text, self._looked)
        if found is None:
            self._let_go(Thinking, self._thinking_marks, events)
            return False
        before = self._text[: found.start()].rstrip()
        if before:
            events.append(Thinking(before))
        if found[0] == self._tags.closing:
            self._go("after", found.end())
        else:
            self._begin(found[0], len(before), found.end(), "inner")
        return True

    def _begin_thinking(self) -> bool:
        """White space, and a tag or label that the model writes although the prompt had it; False to wait."""
        at = past_space(self._text, 0)
        if self._repeats:
            found = reach(self._text, at, self._repeats)
            if found is None:
                return False
            if found:
                at = past_space(self._text, at + len(self._repeats))
                self._go("thinking", at)
                self._repeats, at = "", 0
        if at == len(self._text):
            return False
        self._begun = True
        self._text = self._text[at:]
        return True

    def _answer(self, text: str, events: list[Event]) -> None:
        if text:
            self._answered = True
            events.append(Content(text))

    def _let_go(self, kind: type[Content | Thinking], marks: Sequence[str], events: list[Event]) -> None:
        """Give out what can't be part of a mark, or of the white space before one."""
        keep = max((overlap(self._text, mark) for mark in marks), default=0)
        body = len(self._text[: len(self._text) - keep].rstrip())
        if body:
            events.append(kind(self._text[:body]))
            self._answered = self._answered or kind is Content
            self._text = self._text[body:]
        self._looked = max(0, len(self._text) - keep)

    def _begin(self, opening: str, start: int, end: int, state: Literal["call", "inner"]) -> None:
        """Read a call; `start` is where the text begins that comes out again if it is none."""
        assert self._syntax is not None
        self._go(state, start)
        self._opening_end = end - start
        self._tagged = opening in self._openings
        self._reader = self._syntax.reader(opening, self._opening_end, self._tools)

    def _bounded(self, outcome: Outcome) -> Outcome:
        """A call inside thinking must be complete before thinking ends, and must be one that could be made."""
        assert self._tags is not None
        closing = self._text.find(self._tags.closing, max(self._opening_end, self._looked))
        self._looked = max(self._looked, len(self._text) - len(self._tags.closing) + 1)
        if closing >= 0 and (not isinstance(outcome, Done) or outcome.end > closing):
            return _FAILED
        return outcome

    def _settle(self, outcome: Outcome, events: list[Event]) -> None:
        """What became of a call."""
        inner = self._state == "inner"
        self._reader = None
        if isinstance(outcome, Done) and inner and any(call.name not in self._tools for call in outcome.calls):
            outcome = _FAILED
        if isinstance(outcome, Done):
            source = self._text[: outcome.end]
            found = [
                ToolCallEvent(call, "" if index else source if inner else source.lstrip())
                for index, call in enumerate(outcome.calls)
            ]
            if inner:
                self._drafts += found
                self._go("drafted", outcome.end)
            else:
                self._undraft(events, as_calls=False)
                self._made_call = True
                events += found
                self._go("after", outcome.end)
            return
        self._failures += 1
        self._undraft(events, as_calls=False)
        if not inner and self._tagged:
            self._warn()
        if self._failures >= _MOST_FAILURES:
            self._syntax = None
            self._compile()
        # Only the opening is given up: what follows may hold a call that can be read.
        given_up = self._text[: self._opening_end]
        if inner:
            events.append(Thinking(given_up))
        else:
            self._answer(given_up, events)
        self._go("thinking" if inner else "content", self._opening_end)

    def _drafted(self, events: list[Event]) -> bool:
        """A call was read inside thinking: whether it counts depends on what follows it."""
        assert self._tags is not None
        at = past_space(self._text, 0)
        found = reach_any(self._text, at, self._thinking_marks)
        if found is None or at == len(self._text):
            return False
        if found == self._tags.closing:
            self._go("after", at + len(self._tags.closing))
        elif isinstance(found, str):
            self._begin(found, 0, at + len(found), "inner")
        else:
            self._undraft(events, as_calls=False)
            self._state = "thinking"
            self._looked = 0
        return True

    def _undraft(self, events: list[Event], *, as_calls: bool) -> None:
        """Decide about the calls that were made inside thinking."""
        drafts, self._drafts = self._drafts, []
        if as_calls:
            events += drafts
        else:
            events += [Thinking(draft.source) for draft in drafts if draft.source]

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            log.warning("the reply holds what looks like a tool call and can't be read as one; it is sent as text")
