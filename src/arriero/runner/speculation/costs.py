"""What rounds cost and how many drafts stay, as measured."""

from __future__ import annotations

from bisect import bisect_left, insort

COST_WEIGHT = 0.3
CLAMP = 0.25
"""Most of a cost that one sample can move it by, before the weight: a stall says little."""
RATE_WEIGHT = 0.1
TRUSTED = 10
"""Observations before a position's rate counts."""


class Costs:
    """Seconds of a round by its number of drafts; 0 drafts are a plain step."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._known: list[int] = []

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, drafts: int) -> bool:
        return drafts in self._seconds

    def add(self, drafts: int, seconds: float) -> None:
        """Take in one measured round."""
        old = self._seconds.get(drafts)
        if old is None:
            self._seconds[drafts] = seconds
            insort(self._known, drafts)
            return
        step = min(max(seconds - old, -CLAMP * old), CLAMP * old)
        self._seconds[drafts] = old + COST_WEIGHT * step

    def of(self, drafts: int) -> float:
        """Linear between what was measured, flat outside it; KeyError before the first sample."""
        known = self._known
        if not known:
            raise KeyError("no round has been measured")
        at = bisect_left(known, drafts)
        if at == len(known):
            return self._seconds[known[-1]]
        above = known[at]
        if above == drafts or at == 0:
            return self._seconds[above]
        below = known[at - 1]
        part = (drafts - below) / (above - below)
        return self._seconds[below] + part * (self._seconds[above] - self._seconds[below])

    @property
    def plain(self) -> float:
        """Of a plain step, which costs no more than any round: where that was measured otherwise, a busy moment was."""
        return min(self._seconds.values())

    def known(self) -> dict[int, float]:
        """What was measured."""
        return dict(sorted(self._seconds.items()))


class Rates:
    """How often the draft of each position stays, given that those before it did."""

    def __init__(self) -> None:
        self._rates: list[float] = []
        self._counts: list[int] = []
        self.frontier = 0
        """Leading positions whose rates are trusted."""

    def add(self, accepted: int, judged: int) -> None:
        """Take in a round in which `accepted` of the first `judged` drafts stayed; later ones were not judged."""
        for i in range(min(judged, accepted + 1)):
            outcome = 1.0 if i < accepted else 0.0
            if i == len(self._rates):
                self._rates.append(outcome)
                self._counts.append(1)
                continue
            self._rates[i] += RATE_WEIGHT * (outcome - self._rates[i])
            self._counts[i] += 1
        while self.frontier < len(self._counts) and self._counts[self.frontier] >= TRUSTED:
            self.frontier += 1

    def rate(self, position: int) -> float:
        """Of a position from 0 on; one that is not trusted has that of the last one that is, at first 1."""
        trusted = min(position, self.frontier - 1)
        return self._rates[trusted] if trusted >= 0 else 1.0
