"""Progress on stderr: bars and spinners on a terminal, one plain line a step elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

import click


class Progress:
    """Shows a stream of `{"status", "digest"?, "total"?, "completed"?}` objects."""

    def __init__(self) -> None:
        self._tty = sys.stderr.isatty()
        self._live: Any = None
        self._tasks: dict[str, Any] = {}
        self._last = ""

    def __enter__(self) -> Self:
        if self._tty:
            # Imported here: rich takes as long to import as a whole short verb.
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, SpinnerColumn, TextColumn
            from rich.progress import Progress as RichProgress

            self._live = RichProgress(
                SpinnerColumn(finished_text="✓"),
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                console=Console(stderr=True),
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, status: str, completed: int = 0, total: int = 0) -> None:
        """One step; the same status again only moves its bar."""
        if self._live is None:
            if status != self._last:
                click.echo(status, err=True)
            self._last = status
            return
        task = self._tasks.get(status)
        if task is None:
            for other in self._tasks.values():
                self._live.update(other, completed=1 if self._live.tasks[other].total is None else None, total=None)
            task = self._tasks[status] = self._live.add_task(status, total=total or None)
        self._live.update(task, completed=completed, total=total or None)

    def follow(self, updates: Iterable[dict[str, Any]]) -> None:
        """Show every object of a status stream."""
        for update in updates:
            self.show(update.get("status", ""), update.get("completed", 0), update.get("total", 0))
