"""One blob over the network: parts in parallel, resumed where they broke off, hashed as they come."""

from __future__ import annotations

import hashlib
import logging
import re
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, suppress

import httpx

from arriero.errors import Cancelled, NotFound, RegistryError, StoreError
from arriero.store.blobs import Blobs
from arriero.store.registry.client import Temporary
from arriero.store.registry.limits import Limits
from arriero.store.registry.partial import Part, Partial
from arriero.store.registry.progress import Tally

log = logging.getLogger(__name__)

Source = Callable[[str, dict[str, str]], AbstractContextManager[httpx.Response]]
"""Opens a blob by its digest, with request headers (`Range`)."""

_CHUNK = 1 << 20
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(?:\d+|\*)")


class Pace:
    """What all transfers of one pull share: how many run at once, how fast they are, and that they are to end."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.bodies = threading.Semaphore(limits.streams)
        self.ended = threading.Event()
        self._speeds: deque[float] = deque(maxlen=30)

    def check(self) -> None:
        """Raises Cancelled once the transfers are to end."""
        if self.ended.is_set():
            raise Cancelled("the transfer was given up")

    def finished(self, count: int, seconds: float) -> None:
        """Remember the speed of a body; short ones say nothing."""
        if count >= self.limits.telling and seconds > 0:
            self._speeds.append(count / seconds)

    def is_slow(self, count: int, seconds: float) -> bool:
        """Whether a connection that still runs is far slower than others were: a new one may be faster."""
        if seconds < self.limits.slow_after or len(self._speeds) < 3:
            return False
        return count / seconds < 0.1 * statistics.median(self._speeds)


class _RangeIgnoredError(Exception):
    """The server sends the whole blob where a part was asked for."""


class _SlowError(Exception):
    """This connection is to be replaced."""


class Download:
    """One blob on its way into the store."""

    def __init__(self, blobs: Blobs, digest: str, size: int, source: Source, pace: Pace, tally: Tally) -> None:
        self._blobs = blobs
        self._digest = digest
        self._size = size
        self._source = source
        self._pace = pace
        self._limits = pace.limits
        self._tally = tally
        self._partial = Partial(blobs, digest, size)
        self._parts: list[Part] = []
        self._failed = threading.Event()
        self._saving = threading.Lock()
        self._saved = time.monotonic()
        self._ranges = True

    def run(self) -> None:
        """Fetch the blob, or wait until another process (or pull) that is at it has done so.

        Raises RegistryError, StoreError, Cancelled; what has arrived is kept for the next try.
        """
        while not self._partial.claim():
            if self._is_there():
                self._tally.put(self._digest, self._size)
                return
            self._tally.put(self._digest, self._partial.done())
            self._pace.ended.wait(self._limits.report_every)
            self._pace.check()
        try:
            if self._is_there():
                self._partial.discard()
            else:
                self._fetch()
        finally:
            self._partial.close()
        self._tally.put(self._digest, self._size)

    def _is_there(self) -> bool:
        return self._blobs.has(self._digest) and self._blobs.size(self._digest) == self._size

    def _fetch(self) -> None:
        self._parts = self._partial.parts(self._limits.part_size(self._size))
        for part in self._parts:
            part.doubtful |= part.done > 0
        self._tally.put(self._digest, sum(part.done for part in self._parts))
        try:
            found = self._transfer()
        except _RangeIgnoredError:
            log.info("%s is sent as a whole: its server does not know ranges", self._digest)
            self._ranges = False
            self._failed.clear()
            self._parts = [Part(0, self._size)]
            self._tally.put(self._digest, 0)
            found = self._transfer()
        if found != self._digest:
            found = self._repair(found)
        if found != self._digest:
            self._partial.discard()
            raise RegistryError(
                f"digest mismatch, file must be downloaded again: want {self._digest}, got {found}; "
                "the registry sent the same wrong bytes twice"
            )
        self._partial.finish()

    def _transfer(self) -> str:
        """Bring in what is missing and hash it on the way; the digest of what is there then."""
        missing = [part for part in self._parts if part.missing]
        workers = max(1, min(self._limits.streams, len(missing)))
        with ThreadPoolExecutor(workers, thread_name_prefix="part") as pool:
            futures = [pool.submit(self._complete, part) for part in missing]
            try:
                digest = self._hash_along(futures)
            finally:
                self._failed.set()
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            if any(part.done for part in self._parts) and not any(isinstance(e, _RangeIgnoredError) for e in errors):
                with suppress(StoreError):  # a full disk: what is recorded so far still holds
                    self._partial.save(self._parts)
            # The first cause, not those that ended because of it.
            raise min(errors, key=lambda error: isinstance(error, Cancelled))
        return digest

    def _hash_along(self, futures: list[Future[None]]) -> str:
        """Hash the beginning that is complete as it grows, so that little is left to hash at the end."""
        hasher, position = hashlib.sha256(), 0
        while True:
            running = not all(future.done() for future in futures)
            ready = self._complete_bytes()
            while position < ready:
                data = self._partial.read(min(_CHUNK, ready - position), position)
                if not data:
                    raise RegistryError(f"the unfinished blob {self._digest} was cut by another program")
                hasher.update(data)
                position += len(data)
            if not running:
                return f"sha256:{hasher.hexdigest()}"
            done, _ = wait(futures, timeout=0.02, return_when=FIRST_EXCEPTION)
            if any(future.exception() is not None for future in done):
                self._failed.set()
                wait(futures)
                return ""

    def _complete_bytes(self) -> int:
        count = 0
        for part in self._parts:
            count += part.done
            if part.missing:
                break
        return count

    def _complete(self, part: Part) -> None:
        """Bring in one part, over as many connections as that takes."""
        failures = slow = 0
        while part.missing:
            before = part.done
            try:
                with self._pace.bodies:
                    self._receive(part, may_drop=slow < self._limits.tries)
            except _SlowError:
                slow += 1
                part.doubtful = True
            except Temporary as error:
                part.doubtful = True
                failures = 0 if self._ranges and part.done > before else failures
                failures += 1
                if failures >= self._limits.tries:
                    raise RegistryError(f"{error}; given up after {failures} tries") from None
                if not self._ranges:
                    self._tally.add(self._digest, -part.done)
                    part.done = 0
                pause = min(self._limits.backoff * 2 ** (failures - 1), 30.0)
                log.info("%s: %s; next try in %g s", self._digest, error, pause)
                self._pace.ended.wait(pause)

    def _receive(self, part: Part, *, may_drop: bool) -> None:
        """One connection's bytes of a part, written as they come."""
        self._check()
        began, count = time.monotonic(), 0
        with self._opened(part.start + part.done, part.end) as response:
            for piece in response.iter_raw():
                self._check()
                if len(piece) > part.missing:
                    raise RegistryError(f"more bytes came of {self._digest} than its manifest says; it is refused")
                self._partial.write(piece, part.start + part.done)
                part.done += len(piece)
                count += len(piece)
                self._tally.add(self._digest, len(piece))
                self._save_now_and_then()
                if may_drop and part.missing and self._pace.is_slow(count, time.monotonic() - began):
                    log.info("%s: a slow connection is replaced", self._digest)
                    raise _SlowError
        if part.missing:
            raise Temporary(f"the transfer of {self._digest} was cut off after {count} bytes")
        self._pace.finished(count, time.monotonic() - began)

    @contextmanager
    def _opened(self, start: int, end: int) -> Iterator[httpx.Response]:
        """A reply whose body is exactly the bytes from `start` to `end`, as far as its head tells."""
        whole = start == 0 and end == self._size
        try:
            with self._source(self._digest, {} if whole else {"Range": f"bytes={start}-{end - 1}"}) as response:
                self._check_head(response, start, end, whole=whole)
                yield response
        except NotFound:
            raise RegistryError(f"blob {self._digest} is not in the registry, though its manifest names it") from None

    def _check_head(self, response: httpx.Response, start: int, end: int, *, whole: bool) -> None:
        host, what = response.url.host, f"blob {self._digest}"
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding != "identity":
            raise RegistryError(f"{host} sends {what} encoded as {encoding[:50]!r}, which was not asked for")
        if response.status_code == 200 and not whole:
            raise _RangeIgnoredError
        if response.status_code != (200 if whole else 206):
            raise RegistryError(f"{host} answers {response.status_code} where {what} was asked for")
        length = response.headers.get("Content-Length", str(end - start))
        if length != str(end - start):
            raise RegistryError(
                f"size mismatch: {host} sends {length[:30]} bytes of {what} where {end - start} were asked for"
            )
        range_ = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if not whole and (range_ is None or range_[1] != str(start) or range_[2] != str(end - 1)):
            shown = response.headers.get("Content-Range", "none")
            raise RegistryError(f"{host} was asked for bytes {start}-{end - 1} of {what} and sends {shown[:100]!r}")

    def _check(self) -> None:
        self._pace.check()
        if self._failed.is_set():
            raise Cancelled("another part failed")

    def _save_now_and_then(self) -> None:
        now = time.monotonic()
        if now - self._saved < self._limits.save_every or not self._ranges:
            return
        with self._saving:
            if now - self._saved >= self._limits.save_every:
                self._saved = now
                self._partial.save(self._parts)

    def _repair(self, found: str) -> str:
        """Fetch part after part again, the doubtful first, until the hash is right; the digest in the end."""
        self._failed.clear()
        for part in sorted(self._parts, key=lambda part: not part.doubtful):
            for attempt in range(1, self._limits.tries + 1):
                try:
                    changed = self._replace(part)
                    break
                except Temporary:
                    if attempt == self._limits.tries:
                        raise
                    self._pace.ended.wait(self._limits.backoff)
            if changed:
                log.warning(
                    "bytes %d to %d of %s had arrived wrong and were fetched again", part.start, part.end, self._digest
                )
                found = self._hash_along([])
                if found == self._digest:
                    break
        return found

    def _replace(self, part: Part) -> bool:
        """Fetch a part again over what is there; whether anything differed."""
        self._check()
        position, changed = part.start, False
        with self._pace.bodies, self._opened(part.start, part.end) as response:
            for piece in response.iter_raw():
                self._check()
                if len(piece) > part.end - position:
                    raise RegistryError(f"more bytes came of {self._digest} than its manifest says; it is refused")
                if self._partial.read(len(piece), position) != piece:
                    self._partial.write(piece, position)
                    changed = True
                position += len(piece)
        if position < part.end:
            raise Temporary(f"the transfer of {self._digest} was cut off")
        return changed
