"""A blob on its way: a sparse file, a record of which parts are there, and a lock that says who is at work.

`sha256-<hex>-partial` holds the bytes and the lock (`flock`, so it dies with its process); `sha256-<hex>-partial.json`
says how far each part is. Whoever finds the lock taken can read from the record how far the other is.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

import msgspec

from arriero.errors import StoreError
from arriero.store.blobs import Blobs


class Part(msgspec.Struct):
    """The bytes `start` to `end` (exclusive) of a blob, of which the first `done` are there."""

    start: int
    end: int
    done: int = 0
    doubtful: bool = False
    """Whether it was put together by several connections; looked at first when the hash is wrong."""

    @property
    def missing(self) -> int:
        """Bytes still to come."""
        return self.end - self.start - self.done


class _Record(msgspec.Struct):
    size: int
    parts: list[Part]


class Partial:
    """The unfinished file of one blob, ours alone from `claim` to `close`."""

    def __init__(self, blobs: Blobs, digest: str, size: int) -> None:
        self._blobs = blobs
        self.digest = digest
        self.size = size
        self.target = blobs.path(digest)
        self.path = self.target.with_name(self.target.name + "-partial")
        self._record = self.path.with_name(self.path.name + ".json")
        self.descriptor = -1

    def claim(self) -> bool:
        """Take the lock; False while somebody else is at work. Raises StoreError."""
        try:
            self._blobs.folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise self.failure(error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The file that we locked may have been renamed to the finished blob meanwhile.
            if os.fstat(descriptor).st_ino == self.path.stat().st_ino:
                self.descriptor, descriptor = descriptor, -1
                return True
        except (BlockingIOError, FileNotFoundError):
            return False
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        return False

    def parts(self, part_size: int) -> list[Part]:
        """What an earlier try has left, or a fresh plan."""
        record = self._read()
        if record is not None and os.fstat(self.descriptor).st_size == self.size:
            return record.parts
        try:
            os.ftruncate(self.descriptor, 0)
            os.ftruncate(self.descriptor, self.size)
        except OSError as error:
            raise self.failure(error) from error
        return [Part(start, min(start + part_size, self.size)) for start in range(0, self.size, part_size)]

    def save(self, parts: list[Part]) -> None:
        """Record how far the parts are; bytes that the record counts are in the file before it."""
        temporary = self._record.with_name(self._record.name + ".tmp")
        try:
            temporary.write_bytes(msgspec.json.encode(_Record(self.size, parts)))
            os.replace(temporary, self._record)
        except OSError as error:
            raise self.failure(error) from error

    def done(self) -> int:
        """Bytes that are there by the record, whoever is at work."""
        record = self._read()
        return 0 if record is None else sum(part.done for part in record.parts)

    def write(self, data: bytes, offset: int) -> None:
        """Bytes at their place; raises StoreError when the disk refuses them."""
        view = memoryview(data)
        try:
            while view:
                written = os.pwrite(self.descriptor, view, offset)
                view, offset = view[written:], offset + written
        except OSError as error:
            raise self.failure(error) from error

    def read(self, count: int, offset: int) -> bytes:
        """Bytes of the file."""
        return os.pread(self.descriptor, count, offset)

    def finish(self) -> None:
        """Sync, and give the file its name as a blob."""
        try:
            os.fsync(self.descriptor)
            os.replace(self.path, self.target)
        except OSError as error:
            raise self.failure(error) from error
        self._record.unlink(missing_ok=True)

    def discard(self) -> None:
        """Delete what is there."""
        self.path.unlink(missing_ok=True)
        self._record.unlink(missing_ok=True)

    def close(self) -> None:
        """Give the lock back."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def failure(self, error: OSError) -> StoreError:
        """What to say when the disk refuses."""
        return StoreError(f"cannot write to the model store at {self._blobs.folder}: {error.strerror}")

    def _read(self) -> _Record | None:
        """The record, or None when there is none that fits this blob."""
        record = read_record(self._record)
        if record is None or record.size != self.size:
            return None
        position = 0
        for part in record.parts:
            if part.start != position or not 0 <= part.done <= part.end - part.start:
                return None
            position = part.end
        return record if position == self.size else None


def read_record(path: Path) -> _Record | None:
    """A record that can be read, else None: a download then starts over."""
    with suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(path.read_bytes(), type=_Record)
    return None
