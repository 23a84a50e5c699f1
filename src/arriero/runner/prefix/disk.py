"""The second tier: stored prefixes as files, which survive the runner and the machine's restart.

One folder for each model and format, so that nothing of another model, dtype or version is ever restored. Files are
written by a thread of their own, under a temporary name first; what was used longest ago goes when the limit is
reached. A damaged file is deleted with a warning.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from arriero.errors import CheckpointError
from arriero.formats.safetensors import SafetensorsFile, write
from arriero.model.contract import Snapshot
from arriero.runner.prefix.keys import Keys, common
from arriero.runner.prefix.record import FORMAT, Record, UnfitRecord, checksum, digest, read_snapshots

log = logging.getLogger(__name__)

SUFFIX = ".prefix"
WAITING_BYTES = 1 << 30
"""Most bytes that wait to be written; what comes on top is not kept on disk."""

PART_SECONDS = 3600
"""Age at which an unfinished file is nobody's any more."""


@dataclass(slots=True)
class Stretch:
    """One file: positions `[start, end)` behind the history `before`."""

    path: Path
    before: str
    start: int
    end: int
    keys: Keys
    written: bool = True


class DiskTier:
    """Files of one model in one folder. The array thread calls it; a writer of its own does the slow part."""

    def __init__(self, folder: Path, limit: int) -> None:
        """`folder` is this model's own; all models' files beside it count against `limit` bytes."""
        self._folder = folder
        self._limit = limit
        self._by_before: dict[str, list[Stretch]] = {}
        self._waiting = 0
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[Stretch, Record] | None] = queue.SimpleQueue()
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("*.part"):  # of a process that was killed, unless it is just being written
            if time.time() - path.stat().st_mtime > PART_SECONDS:
                path.unlink(missing_ok=True)
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            stretch = _opened(path)
            if stretch is not None:
                self._by_before.setdefault(stretch.before, []).append(stretch)
        self._writer = threading.Thread(target=self._write_all, name="prefix-writer", daemon=True)
        self._writer.start()

    def match(self, keys: Keys, parts: bool = False, waiting: bool = False) -> tuple[list[Stretch], int]:
        """The files that hold the longest prefix of `keys`, in order, and its length.

        With `parts` the last file may hold more than the prefix, which is of use only where any position can be
        restored. `waiting` counts files that are still to be written.
        """
        best: tuple[list[Stretch], int] = ([], 0)
        paths: list[tuple[list[Stretch], int]] = [best]
        while paths:
            chain, at = paths.pop()
            if at > best[1]:
                best = chain, at
            for stretch in self._by_before.get(digest(keys[:at]), []):
                same = common(stretch.keys, keys[at:])
                if not stretch.written and not waiting:
                    continue
                if same == len(stretch.keys):
                    paths.append(([*chain, stretch], stretch.end))
                elif parts and at + same > best[1]:
                    best = [*chain, stretch], at + same
        return best

    def read(self, stretch: Stretch, slots: int) -> list[Snapshot | None] | None:
        """The snapshots of a file, which counts as used now; None, and the file is gone, when it is damaged."""
        if not stretch.path.exists():  # made room for others, perhaps of another runner
            self._by_before[stretch.before].remove(stretch)
            return None
        try:
            snapshots = read_snapshots(stretch.path, slots)
            os.utime(stretch.path)
        except (UnfitRecord, OSError) as error:
            log.warning("a stored prefix is not used and removed: %s", error)
            self._by_before[stretch.before].remove(stretch)
            stretch.path.unlink(missing_ok=True)
            return None
        return snapshots

    def room(self, nbytes: int) -> bool:
        """Whether so many bytes may be kept now; says so in the log when not."""
        with self._lock:
            waiting = self._waiting
        if waiting + nbytes <= min(WAITING_BYTES, self._limit):
            return True
        log.warning("a prefix of %d bytes is not kept on disk: %d bytes wait to be written already", nbytes, waiting)
        return False

    def keep(self, record: Record, keys: Keys) -> None:
        """Write a record in the background."""
        with self._lock:
            self._waiting += record.nbytes
        start, end = int(record.metadata["start"]), int(record.metadata["end"])
        before = record.metadata["before"]
        path = self._folder / f"{uuid.uuid4().hex}{SUFFIX}"
        stretch = Stretch(path, before, start, end, np.array(keys[start:end], np.uint64), written=False)
        self._by_before.setdefault(before, []).append(stretch)
        self._queue.put((stretch, record))

    def flush(self) -> None:
        """Wait until everything is written."""
        while True:
            with self._lock:
                if not self._waiting:
                    return
            time.sleep(0.005)

    def close(self) -> None:
        """Write what waits and end the writer."""
        self._queue.put(None)
        self._writer.join()

    def _write_all(self) -> None:
        while (item := self._queue.get()) is not None:
            stretch, record = item
            part = stretch.path.with_suffix(".part")
            try:
                write(part, record.tensors, {**record.metadata, "checksum": checksum(record.tensors)})
                os.replace(part, stretch.path)
                stretch.written = True
                self._make_room()
            except OSError as error:
                log.warning("a prefix could not be kept on disk: %s", error)
                part.unlink(missing_ok=True)
            finally:
                with self._lock:
                    self._waiting -= record.nbytes

    def _make_room(self) -> None:
        """Delete the files used longest ago, of any model, until the limit holds."""
        found = []
        for path in self._folder.parent.glob(f"*/*{SUFFIX}"):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            found.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self._limit:
                return
            path.unlink(missing_ok=True)
            total -= size


def _opened(path: Path) -> Stretch | None:
    """What a file says it holds; None, and a warning, when it can't be read."""
    try:
        file = SafetensorsFile(path)
        said = file.metadata
        if said["format"] != FORMAT:
            raise ValueError(f"its format is {said['format']}")
        stretch = Stretch(path, said["before"], int(said["start"]), int(said["end"]), np.array(file.view("keys")))
        if len(stretch.keys) != stretch.end - stretch.start:
            raise ValueError("its keys are not as many as its positions")
    except (CheckpointError, OSError, KeyError, ValueError, TypeError) as error:
        log.warning("a stored prefix is not used and removed: %s: %s", path.name, error)
        path.unlink(missing_ok=True)
        return None
    return stretch
