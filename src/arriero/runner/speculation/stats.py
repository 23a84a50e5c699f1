"""What speculation did for one row, and for all of them."""

from __future__ import annotations

from itertools import pairwise

from arriero.runner.messages import SpeculationUsed


class Tally:
    """Rounds of one row, counted."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.rounds = 0
        self.drafted = 0
        self.accepted = 0
        self.plain = 0
        self.parked_seconds = 0.0
        self._drafted_at: list[int] = []
        self._accepted_at: list[int] = []
        self._depths: list[int] = []

    def add(self, drafted: int, accepted: int, judged: int) -> None:
        """A round: of `drafted` tokens the first `judged` were looked at and `accepted` of them stayed."""
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self._depths.append(drafted)
        missing = drafted - len(self._drafted_at)
        self._drafted_at += [0] * missing
        self._accepted_at += [0] * missing
        for i in range(min(judged, accepted + 1)):
            self._drafted_at[i] += 1
            self._accepted_at[i] += i < accepted

    def step(self, seconds: float) -> None:
        """A plain step of a row that could have drafted."""
        self.plain += 1
        self.parked_seconds += seconds
        self._depths.append(0)

    def message(self) -> SpeculationUsed:
        """For the row's last message."""
        return SpeculationUsed(
            kind=self.kind,
            rounds=self.rounds,
            drafted=self.drafted,
            accepted=self.accepted,
            reached_by_position=self._drafted_at,
            accepted_by_position=self._accepted_at,
            plain_steps=self.plain,
            parked_ns=int(self.parked_seconds * 1e9),
        )

    def __str__(self) -> str:
        if not self.rounds:
            return f"{self.kind}: nothing drafted in {self.plain} steps"
        places = zip(self._accepted_at, self._drafted_at, strict=True)
        rates = " ".join(f"{a / d:.2f}" for a, d in places if d)
        produced = 1 + self.accepted / self.rounds
        return (
            f"{self.kind}: {self.rounds} rounds, {self.accepted} of {self.drafted} drafts stayed, "
            f"{produced:.2f} tokens a round, by position {rates}; {self.plain} plain steps; "
            f"depth over time {self._over_time()}"
        )

    def _over_time(self, slices: int = 8) -> str:
        """Mean depth of up to eight equal parts of the row."""
        count = len(self._depths)
        edges = [count * i // slices for i in range(slices + 1)]
        parts = [self._depths[a:b] for a, b in pairwise(edges) if b > a]
        return " ".join(f"{sum(part) / len(part):.1f}" for part in parts)
