"""Pulling a model: its manifest, then its blobs in parallel, then its name."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

from arriero.errors import Cancelled, NotFound, RegistryError, StoreError
from arriero.store import manifests
from arriero.store.manifests import ConfigBlob, Manifest
from arriero.store.model import StoredModel
from arriero.store.names import Name
from arriero.store.registry.client import Client, retried
from arriero.store.registry.download import Download, Pace, Source
from arriero.store.registry.key import Key
from arriero.store.registry.limits import Limits
from arriero.store.registry.progress import Report, Tally
from arriero.store.registry.registry import Registry
from arriero.store.store import Store

_MOST_LAYERS = 100_000
_MOST_BYTES = 1 << 50
_LARGEST_CONFIG = 1 << 20


def pull(
    store: Store,
    name: Name,
    report: Report,
    stop: threading.Event,
    *,
    key: Key,
    limits: Limits,
    insecure: bool = False,
) -> StoredModel:
    """Bring a model into the store under its name; blocking, for a thread; the last status is `success`.

    What had arrived is kept when it fails or `stop` is set, and the next pull goes on from there. Raises RegistryError,
    StoreError (a full disk), InvalidRequest (plain HTTP that was not asked for), Cancelled.
    """
    report({"status": "pulling manifest"})
    with Registry(name, key, limits, insecure=insecure) as registry:
        try:
            manifest = checked(retried(registry.manifest, limits, stop))
        except (NotFound, RegistryError) as error:
            raise RegistryError(f"pull model manifest: {error}") from None
        with store.building() as build, store.awaited(manifest):
            blobs = [(layer.digest, layer.size) for layer in (*manifest.layers, manifest.config)]
            fetch(store, blobs, registry.get, registry, report, stop, together=bool(manifest.of(manifests.TENSOR)))
            report({"status": "verifying sha256 digest"})
            check_config(store, manifest)
            report({"status": "writing manifest"})
            model = build.put(name, manifest)
            if build.replaced:
                report({"status": "removing unused layers"})
    report({"status": "success"})
    return model


def checked(raw: bytes) -> Manifest:
    """A registry's manifest of which nothing can do harm; raises RegistryError."""
    try:
        manifest = Manifest.decode(raw)
    except StoreError as error:
        raise RegistryError(f"what the registry sends is no manifest of a model ({error})") from None
    layers = (*manifest.layers, manifest.config)
    if len(layers) > _MOST_LAYERS:
        raise RegistryError(f"the manifest names {len(layers)} layers; at most {_MOST_LAYERS} are taken")
    sizes: dict[str, int] = {}
    for layer in layers:
        check_path(layer.name)
        if sizes.setdefault(layer.digest, layer.size) != layer.size:
            raise RegistryError(f"the manifest gives blob {layer.digest} two sizes")
    if sum(sizes.values()) > _MOST_BYTES:
        raise RegistryError(f"the manifest names {sum(sizes.values())} bytes, more than any model has")
    if manifest.config.size > _LARGEST_CONFIG:
        raise RegistryError(
            f"the manifest's configuration has {manifest.config.size} bytes; at most {_LARGEST_CONFIG} are taken"
        )
    return manifest


def check_path(name: str) -> None:
    """A tensor's or file's name as others send it; raises RegistryError for one that could lead out of a folder."""
    parts = name.split("/")
    if len(name) > 1024 or not name.isprintable() or "\\" in name or (name and not {"", ".", ".."}.isdisjoint(parts)):
        raise RegistryError(f"the name {name[:100]!r} of a layer is refused: it is no plain relative path")


def check_config(store: Store, manifest: Manifest) -> None:
    """That the configuration blob can be read: a model whose blob can't be would be damaged from the start."""
    path = store.find_blob(manifest.config.digest)
    try:
        ConfigBlob.decode(path.read_bytes() if path is not None else b"")
    except StoreError as error:
        raise RegistryError(f"the model's configuration is not one that arriero reads ({error})") from None


def fetch(
    store: Store,
    blobs: Sequence[tuple[str, int]],
    source: Source,
    client: Client,
    report: Report,
    stop: threading.Event,
    *,
    together: bool,
) -> None:
    """Bring in the blobs that no root of the store has, several at once; returns when all are there.

    `together` reports them as one. Raises as `pull` does, and what `report` raises.
    """
    limits = client.limits
    sizes = dict(blobs)
    tally = Tally(sizes)
    missing = []
    for digest, size in sizes.items():
        path = store.find_blob(digest)
        if path is not None and path.stat().st_size == size:
            tally.put(digest, size)
        elif size == 0:
            if store.blobs.put(b"").digest != digest:
                raise RegistryError(f"the manifest names {digest} as empty, which is not the digest of nothing")
        else:
            missing.append((digest, size))
    _check_space(store, missing)
    pace = Pace(limits)
    with ThreadPoolExecutor(max(1, min(limits.streams, len(missing))), thread_name_prefix="pull") as pool:
        # The largest first: a long one that starts last would run alone in the end.
        ordered = sorted(missing, key=lambda blob: -blob[1])
        futures = [
            pool.submit(Download(store.blobs, digest, size, source, pace, tally).run) for digest, size in ordered
        ]
        with ending(pace, client, futures):
            running = set(futures)
            while running:
                done, running = wait(running, timeout=limits.report_every)
                for status in tally.news("pulling", together=together):
                    report(status)
                if stop.is_set():
                    raise Cancelled("the pull was given up; what has arrived is kept")
                if any(future.exception() is not None for future in done):
                    break
    raise_first(futures)
    for status in tally.news("pulling", together=together):
        report(status)


@contextmanager
def ending(pace: Pace, client: Client, futures: Sequence[Future[None]]) -> Iterator[None]:
    """Ends the transfers that still run when its block is left, however it is left."""
    try:
        yield
    finally:
        if not all(future.done() and future.exception() is None for future in futures):
            pace.ended.set()
            for future in futures:
                future.cancel()
            client.abort()


def raise_first(futures: Sequence[Future[None]]) -> None:
    """Raise what went wrong, if anything did: the cause, not what ended because of it."""
    errors = [error for future in futures if not future.cancelled() and (error := future.exception()) is not None]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, Cancelled))


def _check_space(store: Store, missing: Sequence[tuple[str, int]]) -> None:
    """Refuse at once what can't fit the disk; raises StoreError with both figures."""
    folder = store.blobs.folder
    needed = 0
    for digest, size in missing:
        partial = store.blobs.path(digest).with_name(store.blobs.path(digest).name + "-partial")
        needed += max(0, size - _allocated(partial))
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise StoreError(
            f"the disk of the model store at {store.root} has {free} bytes free, and {needed} are still to come; "
            "remove models ('arriero rm') or set ARRIERO_MODELS to a larger disk"
        )


def _allocated(path: Path) -> int:
    """Bytes that a sparse file takes on disk."""
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0
