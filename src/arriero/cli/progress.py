"""Progress on stderr: bars and spinners on a terminal, elsewhere a line a step, and some more for a long one."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

import click

from arriero.cli import human
from arriero.errors import ServerUnreachable

_STEP = 10
"""Percent between two plain lines of one bar."""
_PAUSE = 5.0
"""Seconds between them, at least."""
_TOTAL = "total"


class Progress:
    """Shows a stream of `{"status", "digest"?, "total"?, "completed"?}` objects."""

    def __init__(self) -> None:
        self._tty = sys.stderr.isatty()
        self._live: Any = None
        self._tasks: dict[str, Any] = {}
        self._last = ""
        self._bars: dict[str, tuple[int, int]] = {}
        """Status → bytes done and of all, of every bar so far."""
        self._told: dict[str, tuple[float, int]] = {}
        """When the last plain line of a bar was written, and of how many bytes."""
        self._began: tuple[float, int] | None = None
        """When the first bytes were counted, and how many were there by then."""

    def __enter__(self) -> Self:
        if self._tty:
            from arriero.cli.bars import bars

            self._live = bars()
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            if error is None:
                self._end_spinners()
            self._live.stop()

    def show(self, status: str, completed: int = 0, total: int = 0) -> None:
        """One step; the same status again only moves its bar."""
        if total:
            self._bars[status] = (completed, total)
            if self._began is None:
                self._began = (time.monotonic(), completed)
        if self._live is None:
            self._line(status, completed, total)
        else:
            self._bar(status, completed, total)
            if total and len(self._bars) > 1:
                self._bar(_TOTAL, *self._sum())

    def follow(self, updates: Iterable[dict[str, Any]]) -> None:
        """Show every object of a status stream; raises ServerUnreachable for one that ends without its `success`."""
        status = ""
        for update in updates:
            status = update.get("status", "")
            self.show(status, update.get("completed", 0), update.get("total", 0))
        if status != "success":
            raise ServerUnreachable(f"the server ended its reply after {status!r}, before it was done; see its log")

    def _bar(self, status: str, completed: int, total: int) -> None:
        task = self._tasks.get(status)
        if task is None:
            self._end_spinners()
            task = self._tasks[status] = self._live.add_task(status, total=total or None, measured=bool(total))
        self._live.update(task, completed=completed, total=total or None, measured=bool(total))

    def _end_spinners(self) -> None:
        """A step without bytes is over when the next begins."""
        for task in self._live.tasks:
            if not task.fields["measured"]:
                self._live.update(task.id, completed=1, total=1)

    def _line(self, status: str, completed: int, total: int) -> None:
        """A plain line when a step begins; a long one has more, each ten percent further than the last."""
        now = time.monotonic()
        if status not in self._told:
            if status != self._last:
                click.echo(status, err=True)
            self._last = status
            if total:
                self._told[status] = (now, completed)
            return
        told_at, told = self._told[status]
        if now - told_at < _PAUSE or (completed - told) * 100 < _STEP * total:
            return
        self._told[status] = (now, completed)
        self._last = status
        click.echo(f"{status}: {100 * completed // total}% of {human.size(total)}{self._speed(now)}", err=True)

    def _speed(self, now: float) -> str:
        """`, 12 MB/s, 3 minutes left` over all bars, '' before there is anything to tell."""
        assert self._began is not None, "a bar that has moved has begun"
        done, total = self._sum()
        seconds, moved = now - self._began[0], done - self._began[1]
        if moved <= 0:
            return ""
        left = f", {human.span((total - done) * seconds / moved).lower()} left" if done < total else ""
        return f", {human.size(int(moved / seconds))}/s{left}"

    def _sum(self) -> tuple[int, int]:
        return sum(done for done, _ in self._bars.values()), sum(total for _, total in self._bars.values())
