"""The second tier: stored prefixes as files, which survive the runner and the machine's restart.

One folder for each model and format, so that nothing of another model, dtype or version is ever restored. Files are
written by a thread of their own, under a temporary name first; what was used longest ago goes when the limit is
reached, the end of a history before what it begins with. A damaged file is deleted with a warning. Several processes
may share a folder; what one of them deletes is gone for the others too.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from arriero.errors import CheckpointError
from arriero.formats.safetensors import SafetensorsFile, write
from arriero.model.contract import Snapshot
from arriero.runner.prefix.keys import Keys, common
from arriero.runner.prefix.reading import Reader, Reading
from arriero.runner.prefix.record import FORMAT, Record, UnfitRecord, checksum, history

log = logging.getLogger(__name__)

SUFFIX = ".prefix"
WAITING_BYTES = 1 << 30
"""Most bytes that wait to be written; what comes on top is not kept on disk."""

LOOK_SECONDS = 10
"""How long the size of the folder is taken to be what this process has added to it."""

PART = ".part"
PART_SECONDS = 3600
"""Age at which an unfinished file is nobody's any more."""


@dataclass(slots=True, eq=False)
class Stretch:
    """One file: positions `[start, end)` behind the history `before`."""

    path: Path
    before: str
    start: int
    end: int
    keys: Keys
    nbytes: int
    written: bool = True
    lost: bool = False
    """Could not be written."""
    above: Stretch | None = None
    """The file that it goes on from, where that is known."""

    @property
    def place(self) -> tuple[str, int]:
        """The history before it, and its first key."""
        return self.before, int(self.keys[0])

    @property
    def there(self) -> bool:
        """Whether its file is written, or still to be."""
        return self.path.exists() if self.written else not self.lost


class DiskTier:
    """Files of one model in one folder. The array thread calls it; threads of its own write and read."""

    def __init__(self, folder: Path, limit: int) -> None:
        """`folder` is this model's own; all models' files beside it count against `limit` bytes."""
        self._folder = folder
        self._limit = limit
        self._files: dict[tuple[str, int], list[Stretch]] = {}
        """By the history before them and their first key."""
        self._left = 0
        """Bytes that may still be written before the folder must be looked at."""
        self._looked_at = 0.0
        self._waiting = 0
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[Stretch, Record] | None] = queue.SimpleQueue()
        self._make_folder()
        self._drop_unfinished()
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            stretch = _opened(path)
            if stretch is not None:
                self._files.setdefault(stretch.place, []).append(stretch)
        self._writer = threading.Thread(target=self._write_all, name="prefix-writer", daemon=True)
        self._writer.start()
        self._reader = Reader()

    def match(self, keys: Keys, parts: bool = False, waiting: bool = False) -> tuple[list[Stretch], int]:
        """The files that hold the longest prefix of `keys`, in order, and its length.

        With `parts` the last file may hold more than the prefix, which is of use only where any position can be
        restored. `waiting` counts files that are still to be written.
        """
        best: tuple[list[Stretch], int] = ([], 0)
        paths = [(*best, history())]
        reached = {0}
        while paths:
            chain, at, before = paths.pop()
            if at > best[1]:
                best = chain, at
            for stretch in self._behind((before.hexdigest(), int(keys[at]))) if at < len(keys) else ():
                same = common(stretch.keys, keys[at:])
                if stretch.start != at or not (stretch.written or waiting):
                    continue
                if chain:
                    stretch.above = chain[-1]
                if same == len(stretch.keys) and stretch.end not in reached:
                    reached.add(stretch.end)  # several processes may have written the same
                    after = before.copy()
                    after.update(np.ascontiguousarray(stretch.keys, "<u8").data)
                    paths.append(([*chain, stretch], stretch.end, after))
                elif parts and at + same > best[1]:
                    best = [*chain, stretch], at + same
        return best

    def begin_reading(self, stretches: Sequence[Stretch]) -> Reading:
        """Have files read and checked in the background; `read` then finds them in memory."""
        return self._reader.begin(stretch.path for stretch in stretches)

    def read(self, stretch: Stretch, slots: int, reading: Reading) -> list[Snapshot | None] | None:
        """The snapshots of a file; None, and the file is gone, when it is damaged."""
        try:
            return reading.contents(stretch.path).snapshots(slots)
        except FileNotFoundError:  # made room for others, perhaps of another runner
            return None
        except (UnfitRecord, OSError) as error:
            log.warning("a stored prefix is not used and removed: %s", error)
            self._files[stretch.place].remove(stretch)
            _remove(stretch.path)
            return None

    def touch(self, chain: Sequence[Stretch]) -> None:
        """Count these files as used now, the first of them last: none may go before what goes on from it."""
        now = time.time_ns()
        for i, stretch in enumerate(reversed(chain)):
            try:
                os.utime(stretch.path, ns=(now + i, now + i))
            except OSError:
                continue  # gone, or another user's

    def room(self, nbytes: int) -> bool:
        """Whether so many bytes may be kept now; says so in the log when not."""
        with self._lock:
            waiting = self._waiting
        if waiting + nbytes <= min(WAITING_BYTES, self._limit):
            return True
        log.warning("a prefix of %d bytes is not kept on disk: %d bytes wait to be written already", nbytes, waiting)
        return False

    def keep(self, record: Record, keys: Keys, above: Stretch | None) -> Stretch:
        """Write a record, which goes on from the file `above`, in the background."""
        with self._lock:
            self._waiting += record.nbytes
        start, end = int(record.metadata["start"]), int(record.metadata["end"])
        before = record.metadata["before"]
        path = self._folder / f"{uuid.uuid4().hex}{SUFFIX}"
        own = np.array(keys[start:end], np.uint64)
        stretch = Stretch(path, before, start, end, own, record.nbytes, written=False, above=above)
        self._files.setdefault(stretch.place, []).append(stretch)
        self._queue.put((stretch, record))
        return stretch

    def flush(self) -> None:
        """Wait until everything is written."""
        while True:
            with self._lock:
                if not self._waiting:
                    return
            time.sleep(0.005)

    def close(self) -> None:
        """Write what waits, and end both threads."""
        self._queue.put(None)
        self._writer.join()
        self._reader.close()

    def _behind(self, place: tuple[str, int]) -> list[Stretch]:
        """The files that go on from a history with one key; those that are gone meanwhile are forgotten."""
        found = self._files.get(place, [])
        if found:
            found[:] = [stretch for stretch in found if stretch.there]
        return found

    def _write_all(self) -> None:
        while self._write_next():
            pass

    def _write_next(self) -> bool:
        """Wait for a record and write it; False at the end. Nothing of it is held while the next one is waited for."""
        item = self._queue.get()
        if item is None:
            return False
        stretch, record = item
        try:
            self._write(stretch, record)
        except Exception as error:  # noqa: BLE001 - the writer must go on: rows hand it their records for ever
            stretch.lost = not stretch.written
            log.warning("a prefix could not be kept on disk: %s", error)
        finally:
            with self._lock:
                self._waiting -= record.nbytes
        return True

    def _write(self, stretch: Stretch, record: Record) -> None:
        part = stretch.path.with_suffix(PART)
        self._make_folder()
        try:
            write(part, record.tensors, {**record.metadata, "checksum": checksum(record.tensors, record.metadata)})
            os.replace(part, stretch.path)
        except BaseException:
            _remove(part)
            raise
        stretch.written = True
        chain, above = [stretch], stretch.above
        while above is not None:
            chain.append(above)
            above = above.above
        self.touch(chain[::-1])
        self._make_room(stretch.nbytes)

    def _make_folder(self) -> None:
        """What people said is in these files: nobody else may read them."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _drop_unfinished(self) -> None:
        """Remove files of processes that were killed; one that is young may just be being written."""
        for path in self._folder.parent.glob(f"*/*{PART}"):
            try:
                old = time.time() - path.stat().st_mtime > PART_SECONDS
            except OSError:
                continue
            if old:
                _remove(path)

    def _make_room(self, nbytes: int) -> None:
        """Delete the files used longest ago, of any model, until the limit holds with `nbytes` more than before."""
        self._left -= nbytes
        if self._left > self._limit // 8 and time.monotonic() - self._looked_at < LOOK_SECONDS:
            return  # far from the limit, whatever other processes have written since
        found = []
        for path in self._folder.parent.glob(f"*/*{SUFFIX}"):
            try:
                status = path.stat()
            except OSError:
                continue
            found.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self._limit:
                break
            if _remove(path):
                total -= size
        self._left, self._looked_at = self._limit - total, time.monotonic()


def _remove(path: Path) -> bool:
    """Delete a file that may be gone; False, and a warning, when that is not allowed."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("a stored prefix can't be removed: %s", error)
        return False
    return True


def _opened(path: Path) -> Stretch | None:
    """What a file says it holds; None, and a warning, when it can't be read."""
    try:
        file = SafetensorsFile(path)
        said = file.metadata
        if said["format"] != FORMAT:
            raise ValueError(f"its format is {said['format']}")
        size = path.stat().st_size
        keys = np.array(file.view("keys"), np.uint64)
        stretch = Stretch(path, said["before"], int(said["start"]), int(said["end"]), keys, size)
        if not 0 < len(stretch.keys) == stretch.end - stretch.start:
            raise ValueError("its keys are not as many as its positions")
    except (CheckpointError, OSError, KeyError, ValueError, TypeError) as error:
        if path.exists():  # else another process has made room
            log.warning("a stored prefix is not used and removed: %s: %s", path.name, error)
            _remove(path)
        return None
    return stretch
