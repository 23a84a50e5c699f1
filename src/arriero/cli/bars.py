"""Bars on a terminal. A module of its own because rich takes as long to import as a whole short verb."""

from __future__ import annotations

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text


class _Measured(ProgressColumn):
    """A column that only steps with bytes have."""

    def __init__(self, column: ProgressColumn) -> None:
        super().__init__()
        self._column = column

    def render(self, task: Task) -> RenderableType:
        return self._column(task) if task.fields.get("measured") else Text("")


def bars() -> Progress:
    """A live display on stderr; tasks with the field `measured` have a bar, bytes, speed and time left."""
    measured = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(compact=True))
    return Progress(
        SpinnerColumn(finished_text="✓"),
        TextColumn("{task.description}", markup=False),
        *(_Measured(column) for column in measured),
        console=Console(stderr=True),
    )
