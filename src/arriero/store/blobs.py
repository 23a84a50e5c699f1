"""Content-addressed files: `blobs/sha256-<hex>`, each written under a temporary name, synced, then renamed.

A blob's name is the hash of its bytes at every moment, whenever a process dies. Refuses to know manifests.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from arriero.errors import InvalidRequest, NotFound, StoreError
from arriero.store.manifests import check_digest

CHUNK = 1 << 20


class Ingested(NamedTuple):
    """A blob that is now in the store."""

    digest: str
    size: int
    created: bool
    """False when a blob of this content was there before."""


class BlobWriter:
    """A blob being written; `commit` names it, anything else leaves nothing behind."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._path: Path | None
        self._path, self._descriptor = blobs.temporary()
        self._hash = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append bytes; raises StoreError when the disk refuses them."""
        view = memoryview(data).cast("B")
        self._hash.update(view)
        try:
            while view:
                written = os.write(self._descriptor, view)
                self.size += written
                view = view[written:]
        except OSError as error:
            raise StoreError(f"cannot write to the model store at {self._blobs.folder}: {error.strerror}") from error

    def commit(self, expected: str | None = None) -> Ingested:
        """Sync and rename to the content's name; raises InvalidRequest when that is not the expected digest.

        An older file of that name is replaced: its bytes are the same, unless the disk has damaged them.
        """
        digest = f"sha256:{self._hash.hexdigest()}"
        if expected is not None and check_digest(expected) != digest:
            raise InvalidRequest(f'digest mismatch, expected "{expected}", got "{digest}"')
        target = self._blobs.path(digest)
        assert self._path is not None, "a blob is committed once"
        try:
            os.fsync(self._descriptor)
            created = not target.exists()
            os.replace(self._path, target)
        except OSError as error:
            raise StoreError(f"cannot write to the model store at {self._blobs.folder}: {error.strerror}") from error
        self._path = None
        return Ingested(digest, self.size, created)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)
        if self._path is not None:
            self._path.unlink(missing_ok=True)


class Blobs:
    """The blobs folder of one store."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, digest: str) -> Path:
        """Where a blob is or would be; raises InvalidRequest for a malformed digest."""
        try:
            return self.folder / check_digest(digest).replace(":", "-")
        except ValueError as error:
            raise InvalidRequest(str(error)) from None

    def has(self, digest: str) -> bool:
        """Whether the blob is there."""
        return self.path(digest).is_file()

    def size(self, digest: str) -> int:
        """Its bytes; raises NotFound."""
        try:
            return self.path(digest).stat().st_size
        except FileNotFoundError:
            raise NotFound(f"blob {digest} not found") from None

    def read(self, digest: str, limit: int = 64 << 20) -> bytes:
        """A small blob as a whole; raises NotFound, and StoreError for one that is unreadable or over `limit` bytes."""
        size = self.size(digest)
        if size > limit:
            raise StoreError(f"blob {digest} has {size} bytes; at most {limit} are expected of its kind")
        try:
            return self.path(digest).read_bytes()
        except OSError as error:
            raise StoreError(f"blob {digest} cannot be read: {error.strerror}") from error

    def temporary(self) -> tuple[Path, int]:
        """A fresh file beside the blobs and its descriptor, open for writing; raises StoreError."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"tmp-{os.getpid()}-{secrets.token_hex(8)}"
            return path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StoreError(f"cannot write to the model store at {self.folder}: {error.strerror}") from error

    def writer(self) -> BlobWriter:
        """A context manager that takes a blob piece by piece."""
        return BlobWriter(self)

    def ingest(self, chunks: Iterable[bytes | memoryview], expected: str | None = None) -> Ingested:
        """Store a stream; raises InvalidRequest when its hash is not `expected`."""
        with self.writer() as writer:
            for chunk in chunks:
                writer.write(chunk)
            return writer.commit(expected)

    def put(self, data: bytes) -> Ingested:
        """Store bytes; a blob of this content that is already there is kept, its time renewed."""
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        path = self.path(digest)
        with suppress(FileNotFoundError):
            if path.stat().st_size == len(data) and path.read_bytes() == data:
                self.touch(digest)
                return Ingested(digest, len(data), created=False)
        return self.ingest([data])

    def touch(self, digest: str) -> bool:
        """Renew a blob's time so that no prune takes it; False when it is not there."""
        try:
            os.utime(self.path(digest))
        except FileNotFoundError:
            return False
        except PermissionError:
            # Another user's file in a shared store: its group may write the folder but not the file's times.
            return True
        return True

    def adopt(self, digest: str, other: Blobs) -> None:
        """Take over a blob of another store: by a hard link, or by a verified copy where links can't reach."""
        if self.touch(digest):
            return
        source = other.path(digest)
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            # A link to a symbolic link would be one more symbolic link, relative to the wrong folder.
            os.link(source.resolve(), self.path(digest))
        except FileExistsError:
            return
        except FileNotFoundError:
            raise StoreError(f"blob {digest} is missing from {other.folder}") from None
        except OSError:
            try:
                self.ingest(read_chunks(source), expected=digest)
            except InvalidRequest as error:
                raise StoreError(f"{source} is damaged: {error}; pull its model again") from None
        else:
            # A hard link shares its time with the other store's file, which we leave as it is.
            return

    def remove(self, digest: str) -> bool:
        """Delete a blob; False when it was not there."""
        try:
            self.path(digest).unlink()
        except FileNotFoundError:
            return False
        return True

    def intact(self, digest: str) -> bool:
        """Whether the blob's bytes hash to its name (reads all of it); raises NotFound."""
        path = self.path(digest)
        if not path.is_file():
            raise NotFound(f"blob {digest} not found")
        hasher = hashlib.sha256()
        for chunk in read_chunks(path):
            hasher.update(chunk)
        return f"sha256:{hasher.hexdigest()}" == check_digest(digest)

    def files(self) -> Iterator[os.DirEntry[str]]:
        """Every file in the folder, blobs or not."""
        if not self.folder.is_dir():
            return
        with os.scandir(self.folder) as entries:
            yield from (entry for entry in entries if entry.is_file(follow_symlinks=False))


def read_chunks(path: Path) -> Iterator[bytes]:
    """A file's bytes in pieces of a mebibyte."""
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            yield chunk


def sync_folder(folder: Path) -> None:
    """Make the renames in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def age(entry: os.DirEntry[str], now: float | None = None) -> float:
    """Seconds since a file was last written or touched."""
    return (time.time() if now is None else now) - entry.stat(follow_symlinks=False).st_mtime


@contextmanager
def replacing(blobs: Blobs, target: Path) -> Iterator[int]:
    """Write a whole file to a descriptor, then put it in `target`'s place at once; on an error the old one stays."""
    path, descriptor = blobs.temporary()
    try:
        yield descriptor
        os.fsync(descriptor)
        os.replace(path, target)
        sync_folder(target.parent)
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)
