"""Who has been promised how much memory.

Counts promises, never live bytes: weights that are not resident yet and caches that have not grown yet are owed all the
same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from arriero.errors import OutOfMemory

SCRATCH_BYTES = 256 << 20
"""Room for the intermediates of a forward in one runner."""


@dataclass(slots=True)
class Account:
    """What one runner is promised, in bytes."""

    name: str
    weights: int
    scratch: int = SCRATCH_BYTES
    row: int = 0
    """Caches of one row of full context; 0 while unknown."""
    rows: int = 1
    """Rows that it may run at once."""
    use: Callable[[], int] = int
    """Bytes that the caches of its open requests may grow to, at this moment."""
    granted: int = 0
    """Cache bytes that it was told it may use."""

    @property
    def required(self) -> int:
        """The least that it can work with: weights, scratch and one row."""
        return self.weights + self.scratch + self.row

    @property
    def floor(self) -> int:
        """The least that it holds now: its rows keep what they were admitted with."""
        return self.weights + self.scratch + max(self.row, min(self.granted, self.use()))

    @property
    def reserved(self) -> int:
        """All that it has been promised."""
        return self.weights + self.scratch + max(self.row, self.granted)


class Ledger:
    """The accounts of all runners against one limit, which is read anew at each decision."""

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._accounts: dict[int, Account] = {}

    @property
    def limit(self) -> int:
        """Bytes that all runners together may be promised."""
        return self._limit()

    @property
    def reserved(self) -> int:
        """Bytes promised now."""
        return sum(account.reserved for account in self._accounts.values())

    def open(self, account: Account) -> None:
        """Enter an account; the caller has checked `fits`."""
        self._accounts[id(account)] = account

    def close(self, account: Account) -> None:
        """Strike an account out, when its process is gone; unknown accounts are ignored."""
        self._accounts.pop(id(account), None)

    def free_beside(self, *accounts: Account) -> int:
        """Bytes left for `accounts` when every other runner gives back what it does not need now."""
        mine = {id(account) for account in accounts}
        return self.limit - sum(other.floor for key, other in self._accounts.items() if key not in mine)

    def fits(self, account: Account) -> bool:
        """Whether the account's requirement fits beside the floors of the others."""
        return account.required <= self.free_beside(account)

    def check_alone(self, account: Account) -> None:
        """Raise OutOfMemory when the account could not even be held alone."""
        limit = self.limit
        if account.required > limit:
            raise OutOfMemory(
                f"model {account.name} requires {readable(account.required)} ({readable(account.weights)} of weights,"
                f" {readable(account.row)} for a context, {readable(account.scratch)} to work in) but only"
                f" {readable(limit)} are available; use a smaller model or num_ctx, or raise ARRIERO_MEMORY_LIMIT"
            )

    def divide(self) -> list[Account]:
        """Share out what nobody needs now as cache grants, equally up to what each can use; returns who changed."""
        accounts = list(self._accounts.values())
        left = self.limit - sum(account.floor for account in accounts)
        grants = {}
        for i, account in enumerate(sorted(accounts, key=lambda a: a.row * a.rows)):
            base = account.floor - account.weights - account.scratch
            share = max(0, left) // (len(accounts) - i)
            extra = max(0, min(account.row * account.rows - base, share))
            left -= extra
            grants[id(account)] = base + extra
        changed = [account for account in accounts if account.granted != grants[id(account)]]
        for account in changed:
            account.granted = grants[id(account)]
        return changed


def readable(count: int) -> str:
    """Bytes as people read them: `1.5 GiB`, `300 bytes`."""
    for size, unit in ((30, "GiB"), (20, "MiB")):
        if count >= 1 << size:
            return f"{count / (1 << size):.1f} {unit}"
    return f"{count} bytes"
