"""Files of stored prefixes, read and checked on a thread of their own before the row that needs them begins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from arriero.runner.prefix.record import Contents, read_contents


class Reading:
    """Files that are being read for one row; what was read lives as long as this."""

    def __init__(self, files: Mapping[Path, Future[Contents]] | None = None) -> None:
        self._files = dict(files or {})

    @property
    def done(self) -> bool:
        """Whether nothing is waited for any more."""
        return all(future.done() for future in self._files.values())

    def wait(self, seconds: float) -> None:
        """Wait so long for all of it, and no longer."""
        wait(self._files.values(), seconds)

    def contents(self, path: Path) -> Contents:
        """What a file holds; one that nobody began to read is read now. Raises as `read_contents`."""
        future = self._files.get(path)
        return read_contents(path) if future is None else future.result()


class Reader:
    """The thread."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="prefix-reader")

    def begin(self, paths: Iterable[Path]) -> Reading:
        """Read files in order."""
        return Reading({path: self._pool.submit(read_contents, path) for path in paths})

    def close(self) -> None:
        """End the thread; what it has not begun is not read."""
        self._pool.shutdown(wait=True, cancel_futures=True)
