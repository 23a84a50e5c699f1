"""A file mapped read-only: the bytes under every reader of this room."""

from __future__ import annotations

import errno
import mmap
import sys
from pathlib import Path
from typing import Any

import numpy as np

from arriero.errors import CheckpointError

REPAIR = "pull the model again or create it again"
SHOWN = 200
"""Characters of a name that messages show: a damaged file may have names of any length."""


def map_file(path: str | Path) -> np.ndarray:
    """The file's bytes as a read-only uint8 array that the system pages in on demand.

    Raises CheckpointError when the file is missing, unreadable or empty.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise CheckpointError(f"{path}: expected a file, found something else")
        if size == 0:
            raise CheckpointError(f"{path}: the file is empty; {REPAIR}")
        mapped = _mapped(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: the file is missing; {REPAIR}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
    return mapped.view(np.ndarray)


def _mapped(path: Path) -> np.memmap[Any, np.dtype[np.uint8]]:
    """A mapping holds its file open, and a stored model may have more files than a process may open at first."""
    try:
        return np.memmap(path, dtype=np.uint8, mode="r")
    except OSError as error:
        if error.errno != errno.EMFILE or not _allow_more_files():
            raise
    return np.memmap(path, dtype=np.uint8, mode="r")


def _allow_more_files() -> bool:
    """Raise this process's limit on open files as far as the system lets it; whether that was further than before."""
    if sys.platform == "win32":
        return False
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = hard == resource.RLIM_INFINITY
    for wanted in (1 << 20, 1 << 17, 10240) if unlimited else (hard,):
        if soft != resource.RLIM_INFINITY and wanted > soft:
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            except (OSError, ValueError):
                continue  # macOS takes no more than its own maximum, whatever it calls the limit
            return True
    return False


def read_here_and_there(view: np.ndarray) -> bool:
    """Tell the system that only few rows of a view of a mapped file will be read, so that it reads nothing ahead.

    Without this a first look at each of 12 rows of a 20 GB file took 7 ms on Linux, with it 0.009 ms. Returns whether
    the system was told: not where the view is of no mapped file, or the system takes no such advice.
    """
    found = _mapping(view)
    if found is None or not hasattr(mmap, "MADV_RANDOM"):
        return False
    base, start = found
    aligned = start // mmap.PAGESIZE * mmap.PAGESIZE
    base.madvise(mmap.MADV_RANDOM, aligned, start - aligned + view.nbytes)
    return True


def read_soon(view: np.ndarray, rows: np.ndarray) -> bool:
    """Ask the system to read some rows (of the first axis) of a view of a mapped file, all at once, without waiting.

    Copying rows that are not in memory waits for one read after the other: 32 rows of a 1.6 GB file took 2 ms, and
    0.4 ms when they were asked for before. Returns whether the system was asked, as `read_here_and_there` does.
    """
    found = _mapping(view)
    if found is None or not hasattr(mmap, "MADV_WILLNEED"):
        return False
    base, start = found
    row = view.nbytes // max(1, len(view))
    begins = start + rows.astype(np.int64) * row
    pages = begins // mmap.PAGESIZE * mmap.PAGESIZE
    for page, begin in zip(pages.tolist(), begins.tolist(), strict=True):
        base.madvise(mmap.MADV_WILLNEED, page, begin - page + row)
    return True


def _mapping(view: np.ndarray) -> tuple[mmap.mmap, int] | None:
    """The mapping that a contiguous view is of, and where in it the view begins."""
    whole, base = view, view.base
    while isinstance(base, np.ndarray):
        whole, base = base, base.base
    if not isinstance(base, mmap.mmap):
        return None
    return base, view.ctypes.data - whole.ctypes.data
