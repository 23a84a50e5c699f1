"""The contract between the machine that follows a reply and the readers of one family's calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from arriero.chat.messages import ToolCall
from arriero.chat.parsers.marks import past_space
from arriero.chat.parsers.offered import OfferedTools


@dataclass(frozen=True, slots=True)
class Done:
    """Calls were read up to `end`."""

    end: int
    calls: tuple[ToolCall, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """What was written is no call."""


Outcome = Done | Failed | None
"""None: more text is needed."""


class Reader(Protocol):
    """Reads one call, or one block of them, from a growing text; remembers how far it got."""

    def read(self, text: str) -> Outcome:
        """Go on from where the last look ended; the text is the same as before with more at its end.

        What it says must not depend on how much more there is: only on the text up to the place that decides.
        """
        ...

    def finish(self, text: str) -> Outcome:
        """The text is all there will ever be: what can be made of it. A call whose end is missing is none."""
        ...


class Syntax(Protocol):
    """How a family writes calls."""

    @property
    def openings(self) -> tuple[str, ...]:
        """What a call begins with, wherever it stands."""
        ...

    @property
    def leads(self) -> tuple[str, ...]:
        """What a call begins with when nothing of the answer stands before it."""
        ...

    def reader(self, opening: str, start: int, tools: OfferedTools) -> Reader:
        """A reader for what follows `opening`, which ends at `start`."""
        ...


class Choice:
    """A reader that is chosen by what comes first."""

    def __init__(self, start: int, choose: Callable[[str, int], Reader | Failed | None]) -> None:
        """`choose` gets the text and the place of its first character that is no white space."""
        self._at = start
        self._choose = choose
        self._chosen: Reader | None = None

    def read(self, text: str) -> Outcome:
        if self._chosen is None:
            self._at = past_space(text, self._at)
            found = self._choose(text, self._at) if self._at < len(text) else None
            if found is None or isinstance(found, Failed):
                return found
            self._chosen = found
        return self._chosen.read(text)

    def finish(self, text: str) -> Outcome:
        return Failed() if self._chosen is None else self._chosen.finish(text)
