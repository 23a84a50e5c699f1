"""Pushing a model: blobs that the registry lacks in parallel, then its manifest."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import httpx

from arriero.errors import Cancelled, InvalidRequest, RegistryError
from arriero.store import manifests
from arriero.store.manifests import Layer
from arriero.store.names import Name
from arriero.store.registry.address import follow
from arriero.store.registry.client import Temporary, retried
from arriero.store.registry.download import Pace
from arriero.store.registry.key import Key
from arriero.store.registry.limits import Limits
from arriero.store.registry.progress import Report, Tally
from arriero.store.registry.pull import ending, raise_first
from arriero.store.registry.registry import Registry
from arriero.store.store import Store

log = logging.getLogger(__name__)

_CHUNK = 1 << 20


def push(
    store: Store,
    name: Name,
    report: Report,
    stop: threading.Event,
    *,
    key: Key,
    limits: Limits,
    insecure: bool = False,
) -> None:
    """Send a model to the registry of its name; blocking, for a thread; the last status is `success`.

    Raises NotFound, StoreError (a damaged model), RegistryError, InvalidRequest (plain HTTP not asked for), Cancelled.
    """
    report({"status": "retrieving manifest"})
    model = store.get(name)
    manifest = model.manifest
    files = {layer.digest: (layer, model.path(layer)) for layer in (*manifest.layers, manifest.config)}
    together = bool(manifest.of(manifests.TENSOR))
    tally = Tally({digest: layer.size for digest, (layer, _) in files.items()})
    pace = Pace(limits)
    with Registry(name, key, limits, insecure=insecure) as registry, store.keeping():
        with ThreadPoolExecutor(limits.streams, thread_name_prefix="push") as pool:
            futures = [pool.submit(Upload(registry, layer, path, pace, tally).run) for layer, path in files.values()]
            with ending(pace, registry, futures):
                running = set(futures)
                while running:
                    done, running = wait(running, timeout=limits.report_every)
                    for status in tally.news("pushing", together=together):
                        report(status)
                    if stop.is_set():
                        raise Cancelled("the push was given up")
                    if any(future.exception() is not None for future in done):
                        break
        raise_first(futures)
        for status in tally.news("pushing", together=together):
            report(status)
        report({"status": "pushing manifest"})
        retried(lambda: registry.put_manifest(manifest.raw), limits, stop)
    report({"status": "success"})


class Upload:
    """One blob on its way to a registry."""

    def __init__(self, registry: Registry, layer: Layer, path: Path, pace: Pace, tally: Tally) -> None:
        self._registry = registry
        self._layer = layer
        self._path = path
        self._pace = pace
        self._limits = pace.limits
        self._tally = tally

    def run(self) -> None:
        """Send the blob unless the registry has it; a broken upload is begun anew a few times."""
        for attempt in range(1, self._limits.tries + 1):
            self._pace.check()
            try:
                with self._pace.bodies:
                    self._send()
                break
            except Temporary as error:
                if attempt == self._limits.tries:
                    raise RegistryError(f"{error}; given up after {attempt} tries") from None
                log.info("pushing %s: %s; begun anew", self._layer.digest, error)
                self._pace.ended.wait(min(self._limits.backoff * 2 ** (attempt - 1), 30.0))
        self._tally.put(self._layer.digest, self._layer.size)

    def _send(self) -> None:
        self._tally.put(self._layer.digest, 0)
        digest, registry = self._layer.digest, self._registry
        with registry.open("HEAD", registry.blob(digest), accept=(404,)) as response:
            if response.status_code == 200:
                return
        begin = registry.repository.join("blobs/uploads/").copy_merge_params({"digest": digest})
        mount = self._origin()
        if mount is not None:
            begin = begin.copy_merge_params({"mount": digest, "from": f"{mount.namespace}/{mount.model}"})
        headers = {"X-Redirect-Uploads": "2", "X-Content-Length": str(self._layer.size)}
        with registry.open("POST", begin, headers=headers, content=b"", redirects=False) as response:
            if response.status_code in (200, 201):
                return
            session = self._next(response, begin)
            direct = response.headers.get("X-Direct-Upload-URL")
            signed = {
                name[len("x-signed-header-") :]: value
                for name, value in response.headers.items()
                if name.lower().startswith("x-signed-header-")
            }
        if direct:
            target = follow(registry.root, registry.root, direct)
            signed["Content-Length"] = str(self._layer.size)
            body = self._bytes(0, self._layer.size)
            with registry.open("PUT", target, headers=signed, content=body, redirects=False, anonymous=True):
                etag = ""
        else:
            session, etag = self._in_parts(session)
        finish = session.copy_merge_params({"digest": digest, **({"etag": etag} if etag else {})})
        with registry.open("PUT", finish, content=b"", redirects=False):
            return

    def _in_parts(self, session: httpx.URL) -> tuple[httpx.URL, str]:
        """Send the blob part by part; the session's last address and the checksum of checksums that ends it."""
        size, step, registry = self._layer.size, self._limits.push_part, self._registry
        total, count = hashlib.md5(usedforsecurity=False), 0
        for start in range(0, size, step):
            end = min(start + step, size)
            part = hashlib.md5(usedforsecurity=False)
            for piece in self._read(start, end):
                part.update(piece)
            total.update(part.digest())
            count += 1
            length = {"Content-Length": str(end - start)}
            headers = {**length, "Content-Range": f"{start}-{end - 1}", "X-Redirect-Uploads": "1"}
            body = self._bytes(start, end)
            target: httpx.URL | None = None
            # The body is spent by then, so a login can't be answered here: the session was opened with a token.
            with registry.open("PATCH", session, headers=headers, content=body, redirects=False) as response:
                if response.status_code == 307:
                    target = follow(registry.root, session, response.headers.get("Location", ""))
                session = self._next(response, session)
            if target is not None:
                self._tally.put(self._layer.digest, start)
                body = self._bytes(start, end)
                with registry.open(
                    "PUT", target, headers=length, content=body, redirects=False, anonymous=True
                ) as response:
                    if response.status_code >= 300:
                        raise RegistryError(f"{target.host} answers {response.status_code} to a part of an upload")
        return session, f"{total.hexdigest()}-{count}"

    def _next(self, response: httpx.Response, current: httpx.URL) -> httpx.URL:
        """Where the upload goes on, always at the registry itself."""
        found = response.headers.get("Docker-Upload-Location")
        if found is None and response.status_code != 307:
            found = response.headers.get("Location")
        if found is None and response.status_code == 307:
            return current
        if not found:
            raise RegistryError(f"{self._registry.root.host} does not say where to upload to")
        return follow(self._registry.root, current, found)

    def _origin(self) -> Name | None:
        """The model of the same registry that the layer was taken from."""
        try:
            name = Name.parse(self._layer.from_)
        except InvalidRequest:
            return None  # none is said, or what is said (by the registry that it came from) is no name
        ours = self._registry.name
        return name if name.host.lower() == ours.host.lower() else None

    def _read(self, start: int, end: int) -> Iterator[bytes]:
        with self._path.open("rb") as file:
            file.seek(start)
            while start < end:
                piece = file.read(min(_CHUNK, end - start))
                if not piece:
                    raise RegistryError(f"blob {self._layer.digest} became shorter while it was pushed")
                yield piece
                start += len(piece)

    def _bytes(self, start: int, end: int) -> Iterator[bytes]:
        """The same, counted as progress, and ended when the push is."""
        for piece in self._read(start, end):
            self._pace.check()
            yield piece
            self._tally.add(self._layer.digest, len(piece))
