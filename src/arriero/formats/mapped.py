"""A file mapped read-only: the bytes under every reader of this room."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from arriero.errors import CheckpointError

REPAIR = "pull the model again or create it again"


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
        mapped = np.memmap(path, dtype=np.uint8, mode="r")
    except FileNotFoundError:
        raise CheckpointError(f"{path}: the file is missing; {REPAIR}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
    return mapped.view(np.ndarray)
