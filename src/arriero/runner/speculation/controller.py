"""How many tokens to draft: the number that gives most tokens a second by what was measured, or none.

Measured things live as long as the model; what a request may lose by drafting is counted anew in each.
"""

from __future__ import annotations

from typing import Protocol

from arriero.runner.speculation.costs import Costs, Rates

SHORTEST_WAIT = 4
LONGEST_WAIT = 512
"""Rounds between two tries of another depth; doubled while they change nothing."""
RUN = 2
"""Rounds of a try: the first of a new depth also pays for the change, so only the second is a sample of its cost."""
FLOOR = 0.98
"""Part of plain decoding's speed that a request keeps when drafting gains nothing, besides the credit."""
CREDIT = 2.0
"""Plain steps that a request may lose besides; with `FLOOR` that makes 0.97 from 200 tokens on."""
STALE = 256
"""Rounds without a measured plain step after which two are taken: contexts grow, and shrink with the next request."""
REST = 16
"""Plain steps at most that a parked controller lets pass without looking at them: what Python does between two steps
shows in their time (1 % for 3 µs of SmolLM2's 3.7 ms, on processors that compute, too)."""
UNKNOWN = 1.6
"""What a depth that was never measured may cost, as a multiple of the next lower one that was."""


class Depths(Protocol):
    """Decides the depth of each round."""

    def begin(self) -> None:
        """A request starts, or goes on after others ran beside it."""
        ...

    def next(self, most: int) -> int:
        """Drafts of the next round, at most `most` ≥ 0."""
        ...

    def rest(self) -> int:
        """Plain steps that come next whatever is found: they are neither asked about nor observed."""
        ...

    def observe(self, drafted: int, accepted: int, judged: int, produced: int, seconds: float) -> None:
        """A round is over: `drafted` tokens, the first `judged` of which were looked at, `produced` new ones.

        `seconds` run from the end of the round before.
        """
        ...


class EveryRound:
    """As many as there can be, always: for trying a draft out."""

    def begin(self) -> None:
        """Nothing to prepare."""

    def next(self, most: int) -> int:
        return most

    def rest(self) -> int:
        return 0

    def observe(self, drafted: int, accepted: int, judged: int, produced: int, seconds: float) -> None:
        """Nothing is learned."""


class Account:
    """What a request's tokens took, and what plain decoding would have taken, in seconds."""

    def __init__(self) -> None:
        self.plain = 0.0
        self.spent = 0.0

    def add(self, produced: int, step: float, seconds: float) -> None:
        """A round of `produced` tokens, where a plain step takes `step`."""
        self.plain += produced * step
        self.spent += seconds

    def affords(self, seconds: float, step: float, rounds: int = 1) -> bool:
        """Whether rounds of that length together may turn out to give one token each."""
        return self.spent + seconds <= (self.plain + rounds * step) / FLOOR + CREDIT * step


class DepthController:
    """Expected tokens by cost over all depths that were tried and one more, with tries that a request can afford."""

    def __init__(self, limit: int | None = None, *, steady: bool = True) -> None:
        """`limit` is the most that can be drafted; None = any number.

        `steady`: a round's length counts only when the one before had the same depth, since another shape of forward
        takes longer the first time. Not for drafts whose number changes from round to round anyway.
        """
        self._limit = limit
        self._steady = steady
        self.costs = Costs()
        self.rates = Rates()
        self._account = Account()
        self._last: int | None = None
        """Depth of the round before; None where its length says nothing."""
        self._selected = 0
        self._wait = SHORTEST_WAIT
        self._since = 0
        self._try: tuple[int, int] | None = None
        """Depth of a try and the rounds that are left of it."""
        self._first: dict[int, float] = {}
        """What the first round of a depth took that has no sample yet."""
        self._unmeasured = 0
        """Rounds since a plain step was measured."""

    @property
    def wait(self) -> int:
        """Rounds until another depth is tried."""
        return self._wait

    def begin(self) -> None:
        self._account = Account()
        self._last = None
        self._try = None

    def selected(self, most: int) -> int:
        """The best depth up to `most` and one beyond what is trusted; 0 until plain steps and rounds were measured."""
        best = 0
        if 0 not in self.costs or len(self.costs) < 2:
            return best
        value, expected = 1 / self.costs.plain, 1.0
        chance = 1.0
        for depth in range(1, self._reach(most) + 1):
            chance *= self.rates.rate(depth - 1)
            expected += chance
            worth = expected / self.costs.of(depth)
            if worth > value:
                best, value = depth, worth
        return best

    def next(self, most: int) -> int:
        reach = self._reach(most)
        if reach == 0 or 0 not in self.costs or self._unmeasured >= STALE:
            return 0
        step = self.costs.plain
        if self._try is not None:
            depth, left = self._try
            self._try = (depth, left - 1) if left > 1 else None
            if depth <= reach and self._account.affords(self._guess(depth), step):
                return depth
            self._try = None
        chosen = self.selected(most)
        if chosen != self._selected:
            self._selected, self._wait, self._since = chosen, SHORTEST_WAIT, 0
        self._since += 1
        wanted = self._wanted(chosen, reach)
        if wanted is not None and self._account.affords(RUN * self._guess(wanted), step, RUN):
            self._since = 0
            self._try = (wanted, RUN - 1)
            return wanted
        return chosen if chosen and self._account.affords(self.costs.of(chosen), step) else 0

    def rest(self) -> int:
        if self._selected or self._try is not None or 1 not in self.costs or self._last != 0:
            return 0
        steps = min(self._wait - self._since - 1, STALE - self._unmeasured, REST)
        if steps <= 0:
            return 0
        self._since += steps
        self._unmeasured += steps
        step = self.costs.plain
        self._account.add(steps, step, steps * step)
        return steps

    def observe(self, drafted: int, accepted: int, judged: int, produced: int, seconds: float) -> None:
        self._unmeasured += 1
        if drafted == self._last or (self._last is not None and not self._steady):
            self.costs.add(drafted, seconds)
            self._unmeasured = self._unmeasured if drafted else 0
        elif drafted not in self.costs:
            self._first[drafted] = seconds
        # The step behind a round has nothing to run beside: what it takes longer is the round's.
        counts, self._last = bool(drafted or self._last), drafted
        if drafted:
            self.rates.add(accepted, judged)
        if 0 in self.costs:
            step = self.costs.plain
            self._account.add(produced, step, seconds if counts else produced * step)

    def _reach(self, most: int) -> int:
        reach = min(most, self.rates.frontier + 1)
        return reach if self._limit is None else min(reach, self._limit)

    def _wanted(self, chosen: int, reach: int) -> int | None:
        """A depth that is worth a try now: one that was never measured, or after a while the next one."""
        unknown = next((depth for depth in range(1, reach + 1) if depth not in self.costs), None)
        if unknown is not None and unknown <= chosen + 1:
            return unknown
        if self._since < self._wait:
            return None
        self._wait = min(2 * self._wait, LONGEST_WAIT)
        if chosen < reach:
            return chosen + 1
        self._since = 0
        return None

    def _guess(self, depth: int) -> float:
        if depth in self.costs:
            return self.costs.of(depth)
        return max(UNKNOWN * self.costs.of(depth - 1), self._first.get(depth, 0.0))


class WholeBlocks:
    """Always as many as the draft gives, but for a target that hardly takes any.

    Plain steps are measured before the first block, and again before a request that has lost by `GUARD` rounds goes on
    plainly: they take longer than they did when the text was short.
    """

    GUARD = 64
    PLAIN = 3

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._step: float | None = None
        """Seconds of the latest plain step that followed another."""
        self._tokens = 0
        self._spent = 0.0
        self._plain_rounds = 0
        self._rounds = 0
        self._guard = self.GUARD
        self._doubted = False
        """Whether the request goes on plainly, should a plain step be as fast as it was."""
        self.parked = False
        self._last: int | None = None

    def begin(self) -> None:
        self._tokens, self._spent, self._rounds = 0, 0.0, 0
        self._guard = self.GUARD // 4 if self.parked else self.GUARD
        self.parked = self._doubted = False
        self._last = None

    def next(self, most: int) -> int:
        if self.parked or self._doubted or self._step is None or self._plain_rounds < self.PLAIN:
            return 0
        return min(most, self._limit)

    def rest(self) -> int:
        return 0

    def observe(self, drafted: int, accepted: int, judged: int, produced: int, seconds: float) -> None:
        follows, self._last = drafted == self._last, drafted
        if not drafted:
            self._plain_rounds += 1
            if follows:
                self._step = seconds
                self.parked = self.parked or (self._doubted and self._loses())
                self._doubted = False
            return
        self._tokens += produced
        self._spent += seconds
        self._rounds += 1
        self._doubted = self._rounds >= self._guard and self._loses()

    def _loses(self) -> bool:
        return self._step is not None and self._spent > self._tokens * self._step / 0.97
