"""Advisory locks between processes that share a store (`flock`; they vanish with the process that holds them)."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from arriero.errors import StoreError


class StoreLocks:
    """The two locks of a store.

    *In use*: whoever builds a model holds it shared, from the first blob that it counts on to its manifest. Whoever
    deletes blobs needs it alone, and does without deleting when it can't have it: the next prune does the work. So no
    one waits for a long import, and no blob vanishes under one.

    *Naming*: held alone for the moment in which a manifest is named, renamed or removed.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    @contextmanager
    def building(self) -> Iterator[None]:
        """Blobs stay while this is held; any number may hold it."""
        with self._locked(".in-use.lock", fcntl.LOCK_SH):
            yield

    @contextmanager
    def collecting(self) -> Iterator[bool]:
        """Whether blobs may be deleted now (nobody is building)."""
        descriptor = self._open(".in-use.lock")
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                alone = True
            except BlockingIOError:
                alone = False
            yield alone
        finally:
            os.close(descriptor)

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Alone with the names."""
        with self._locked(".names.lock", fcntl.LOCK_EX):
            yield

    @contextmanager
    def _locked(self, name: str, operation: int) -> Iterator[None]:
        descriptor = self._open(name)
        try:
            fcntl.flock(descriptor, operation)
            yield
        finally:
            os.close(descriptor)

    def _open(self, name: str) -> int:
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            return os.open(self._root / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StoreError(f"cannot write to the model store at {self._root}: {error.strerror}") from error
