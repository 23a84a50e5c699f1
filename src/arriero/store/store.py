"""The model store: our own folder, and other programs' stores that are read in place.

Every change is one rename, made after everything that it points to is on disk. Refuses to know what is in a blob.
"""

from __future__ import annotations

import builtins
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Self

from arriero.errors import NotFound, StoreError, UnsupportedFeature
from arriero.settings import Settings
from arriero.store.blobs import Blobs, BlobWriter, Ingested, age, replacing, sync_folder
from arriero.store.locks import StoreLocks
from arriero.store.manifests import DIGEST, ConfigBlob, Manifest, check_digest
from arriero.store.model import StoredModel
from arriero.store.names import Name

log = logging.getLogger(__name__)
GRACE = 3600.0
"""Seconds that an unused blob is spared: somebody may be about to name it."""
PARTIAL_GRACE = 7 * 86400.0
"""Seconds that an unfinished download is kept."""


@dataclass(frozen=True)
class _Root:
    folder: Path
    read_only: bool

    @property
    def manifests(self) -> Path:
        return self.folder / "manifests"

    @property
    def blobs(self) -> Blobs:
        return Blobs(self.folder / "blobs")


class Store:
    """Models by name, in one writable root and any number of read-only ones (consulted in order)."""

    def __init__(self, root: Path, read_only_roots: Sequence[Path] = (), *, collect: bool = True) -> None:
        """`collect` False keeps blobs that nobody uses any more (`ARRIERO_NOPRUNE`)."""
        self.root = root
        self._own = _Root(root, read_only=False)
        others = [path for path in read_only_roots if path.resolve() != root.resolve()]
        self._roots = [self._own, *(_Root(path, read_only=True) for path in others)]
        self._locks = StoreLocks(root)
        self._collects = collect
        self._opened: dict[Path, tuple[tuple[int, int, int], StoredModel]] = {}

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        """The store that the environment names, with an existing Ollama store beside it."""
        others = [settings.ollama_models] if settings.ollama_models else []
        return cls(settings.models, others, collect=not settings.no_prune)

    @property
    def blobs(self) -> Blobs:
        """The blobs of our own root."""
        return self._own.blobs

    def find_blob(self, digest: str) -> Path | None:
        """A blob's file in any root, or None; raises InvalidRequest for a malformed digest."""
        return next((path for root in self._roots if (path := root.blobs.path(digest)).is_file()), None)

    def list(self) -> list[StoredModel]:
        """All models, newest first; opens no blob but the configurations; damaged ones are skipped with a warning."""
        models: dict[tuple[str, str, str, str], StoredModel] = {}
        for root in self._roots:
            for name, path in _walk(root.manifests):
                if name.key in models:
                    continue
                try:
                    models[name.key] = self._open(root, name, path)
                except FileNotFoundError:
                    continue  # deleted while we looked
                except StoreError as error:
                    log.warning("model '%s' is skipped: %s", name, error)
        return sorted(models.values(), key=lambda model: model.modified_at, reverse=True)

    def get(self, name: str | Name) -> StoredModel:
        """A model by name, whatever its case; raises InvalidRequest, NotFound, or StoreError for a damaged one."""
        wanted = Name.parse(name) if isinstance(name, str) else name
        for root in self._roots:
            found = _locate(root.manifests, wanted)
            if found is not None:
                try:
                    return self._open(root, *found)
                except FileNotFoundError:
                    continue  # deleted while we looked
                except StoreError as error:
                    raise StoreError(
                        f"model '{found[0]}' is damaged: {error}; pull or create it again, or remove it"
                    ) from None
        raise NotFound(f"model '{name}' not found")

    def __contains__(self, name: str | Name) -> bool:
        wanted = Name.parse(name) if isinstance(name, str) else name
        return any(_locate(root.manifests, wanted) is not None for root in self._roots)

    def put(self, name: str | Name, manifest: Manifest) -> StoredModel:
        """Name a model whose blobs are all in some root; what only a replaced model used is deleted."""
        with self.building() as build:
            return build.put(name, manifest)

    def copy(self, source: str | Name, destination: str | Name) -> None:
        """Give a model a second name; raises NotFound, InvalidRequest."""
        start = Name.parse(source) if isinstance(source, str) else source
        end = Name.parse(destination) if isinstance(destination, str) else destination
        with self.building() as build:
            try:
                model = self.get(start)
            except NotFound:
                raise NotFound(f'model "{source}" not found') from None
            if model.name.key != end.key:
                build.put(end, model.manifest)

    def delete(self, name: str | Name) -> str:
        """Remove a model, damaged or not, and what only it used; its digest.

        Raises NotFound, and UnsupportedFeature in a read-only root.
        """
        wanted = Name.parse(name) if isinstance(name, str) else name
        with self._locks.naming():
            found = _locate(self._own.manifests, wanted)
            if found is None:
                self._refuse_foreign(name, wanted)
                raise NotFound(f"model '{name}' not found")
            path = found[1]
            raw = _bytes(path)
            try:
                digests = Manifest.decode(raw).digests()
            except StoreError:
                digests = set()  # a corrupt manifest: its blobs go with the next prune
            path.unlink()
            self._opened.pop(path, None)
            _remove_empty(path.parent, self._own.manifests)
        self._collect(digests)
        return hashlib.sha256(raw).hexdigest()

    def prune(self) -> int:
        """Delete unused blobs and leftovers that are old enough, unless somebody is building; the number of files.

        Nothing is deleted while a manifest can't be read, since its blobs can't be told from unused ones.
        """
        with self._locks.collecting() as alone:
            if not alone:
                log.info("the store is in use; nothing is pruned")
                return 0
            used = self._used()
            if used is None:
                return 0
            removed, now = 0, time.time()
            for entry in self.blobs.files():
                with suppress(FileNotFoundError):
                    if _is_garbage(entry.name, age(entry, now), used):
                        os.unlink(entry.path)
                        removed += 1
            for path in self._awaited():
                if now - path.stat().st_mtime > PARTIAL_GRACE:
                    path.unlink(missing_ok=True)
                    removed += 1
            with self._locks.naming():
                for folder, _, _ in os.walk(self._own.manifests, topdown=False):
                    _remove_empty(Path(folder), self._own.manifests)
        return removed

    @contextmanager
    def awaited(self, manifest: Manifest) -> Iterator[None]:
        """Spare the blobs of a model that is being pulled, also for a week after the pull broke off.

        Raises StoreError. Once the block ends well the model has a name that keeps them.
        """
        path = self.root / "awaited" / f"{manifest.digest}.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.blobs.folder.mkdir(parents=True, exist_ok=True)
            with replacing(self.blobs, path) as descriptor, os.fdopen(descriptor, "wb", closefd=False) as file:
                file.write(manifest.raw)
        except OSError as error:
            raise StoreError(f"cannot write to the model store at {self.root}: {error.strerror}") from error
        yield
        path.unlink(missing_ok=True)

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """No blob is deleted while this is held."""
        with self._locks.building():
            yield

    def discard(self, digests: Iterable[str]) -> None:
        """Delete those of some blobs that no model uses."""
        self._collect(digests, always=True)

    def unreadable(self) -> builtins.list[str]:
        """Models of any root whose manifest or configuration can't be read, as sentences."""
        problems: builtins.list[str] = []
        for root in self._roots:
            for name, path in _walk(root.manifests):
                try:
                    self._open(root, name, path)
                except FileNotFoundError:
                    continue  # deleted while we looked
                except StoreError as error:
                    problems.append(f"model '{name}' is damaged: {error}; pull or create it again, or remove it")
        return problems

    def verify(self, *, deep: bool = True) -> builtins.list[str]:
        """Everything that is wrong with our own root, as sentences; `deep` hashes every blob."""
        problems: builtins.list[str] = []
        for name, path in _walk(self._own.manifests):
            try:
                model = self._open(self._own, name, path)
                for layer in (model.manifest.config, *model.manifest.layers):
                    model.path(layer)
            except StoreError as error:
                problems.append(f"model '{name}': {error}")
        if deep:
            problems.extend(
                f"blob {entry.name}: its bytes do not hash to its name"
                for entry in self.blobs.files()
                if DIGEST.fullmatch(entry.name) and not self.blobs.intact(entry.name)
            )
        return problems

    @contextmanager
    def building(self) -> Iterator[Build]:
        """Hold the store's blobs in place while a model is put together.

        When it ends, blobs that only a replaced model used are deleted; when it fails, so are those it created.
        """
        build = Build(self, self._own.blobs)
        try:
            with self._locks.building():
                yield build
        except BaseException:
            self._collect(build.created, always=True)
            raise
        self._collect(build.replaced)

    def _name(self, wanted: Name, manifest: Manifest) -> tuple[StoredModel, set[str]]:
        """Write a manifest; the model and the digests of the one that it replaced."""
        for digest in sorted(manifest.digests()):
            if self.blobs.touch(digest):
                continue
            source = next((root.blobs for root in self._roots if root.blobs.has(digest)), None)
            if source is None:
                raise StoreError(f"blob {digest} of model '{wanted}' is missing from the store")
            self.blobs.adopt(digest, source)
        sync_folder(self.blobs.folder)
        with self._locks.naming():
            path = _place(self._own.manifests, wanted)
            replaced: set[str] = set()
            with suppress(FileNotFoundError, StoreError):
                replaced = Manifest.decode(_bytes(path)).digests() - manifest.digests()
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StoreError(f"cannot name model '{wanted}' in the store: {error.strerror}") from error
            with replacing(self.blobs, path) as descriptor, os.fdopen(descriptor, "wb", closefd=False) as file:
                file.write(manifest.raw)
            name = Name.from_path(*path.relative_to(self._own.manifests).parts)
            assert name is not None
            return self._open(self._own, name, path), replaced

    def _open(self, root: _Root, name: Name, path: Path) -> StoredModel:
        """A model by its manifest file, remembered until the file changes; FileNotFoundError when it is gone."""
        status = path.stat()
        stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
        remembered = self._opened.get(path)
        if remembered is not None and remembered[0] == stamp:
            return remembered[1]
        manifest = Manifest.decode(_bytes(path))
        try:
            config = ConfigBlob.decode(root.blobs.read(manifest.config.digest, limit=1 << 20))
        except NotFound as error:
            raise StoreError(f"its configuration is missing: {error}") from None
        modified = datetime.fromtimestamp(status.st_mtime).astimezone()
        model = StoredModel(name, manifest, config, modified, root.blobs, root.read_only)
        self._opened[path] = (stamp, model)
        return model

    def _used(self) -> set[str] | None:
        """Digests that our manifests name, or None when one of them can't be read."""
        used: set[str] = set()
        for name, path in _walk(self._own.manifests):
            try:
                used |= Manifest.decode(_bytes(path)).digests()
            except FileNotFoundError:
                continue
            except StoreError as error:
                log.warning("no blob is deleted, because model '%s' cannot be read: %s", name, error)
                return None
        for path in self._awaited():
            with suppress(StoreError, FileNotFoundError):  # one that can't be read only spares nothing
                if time.time() - path.stat().st_mtime <= PARTIAL_GRACE:
                    used |= Manifest.decode(_bytes(path)).digests()
        return used

    def _awaited(self) -> builtins.list[Path]:
        """Manifests of models whose pulls go on or broke off."""
        return [Path(entry.path) for entry in _scan(self.root / "awaited") if entry.name.endswith(".json")]

    def _collect(self, digests: Iterable[str], *, always: bool = False) -> None:
        """Delete those of some blobs that nobody uses, unless somebody is building (the next prune will)."""
        candidates = set(map(check_digest, digests))
        if not candidates or not (self._collects or always):
            return
        with self._locks.collecting() as alone:
            used = self._used() if alone else None
            if used is None:
                log.info("unused blobs are left for the next prune")
                return
            for digest in candidates - used:
                try:
                    self.blobs.remove(digest)
                except OSError as error:
                    log.warning("unused blob %s stays: it cannot be deleted (%s)", digest, error.strerror)

    def _refuse_foreign(self, shown: str | Name, wanted: Name) -> None:
        for root in self._roots[1:]:
            if _locate(root.manifests, wanted) is not None:
                raise UnsupportedFeature(
                    f"model '{shown}' belongs to the store at {root.folder}, which is only read; "
                    "remove it with the program that owns that store"
                )


class Build:
    """A model being put together: blobs go in first, the manifest last."""

    def __init__(self, store: Store, blobs: Blobs) -> None:
        self._store = store
        self._blobs = blobs
        self.created: set[str] = set()
        self.replaced: set[str] = set()

    def add(self, data: bytes) -> Ingested:
        """Store a small blob."""
        return self._note(self._blobs.put(data))

    def stream(self, fill: Callable[[BlobWriter], None]) -> Ingested:
        """Store a blob that `fill` writes piece by piece."""
        with self._blobs.writer() as writer:
            fill(writer)
            return self._note(writer.commit())

    def put(self, name: str | Name, manifest: Manifest) -> StoredModel:
        """Name the model; raises InvalidRequest, or StoreError when a blob is missing."""
        wanted = Name.parse(name) if isinstance(name, str) else name
        model, replaced = self._store._name(wanted, manifest)
        self.replaced |= replaced
        return model

    def _note(self, ingested: Ingested) -> Ingested:
        if ingested.created:
            self.created.add(ingested.digest)
        return ingested


def _is_garbage(name: str, seconds: float, used: set[str]) -> bool:
    if DIGEST.fullmatch(name):
        return name.replace("-", ":").lower() not in used and seconds > GRACE
    partial = name.startswith("sha256-") and ("-partial" in name or name.endswith(".tmp"))
    return seconds > (PARTIAL_GRACE if partial else GRACE)


def _bytes(manifest: Path) -> bytes:
    """A manifest file's bytes; FileNotFoundError when it is gone, StoreError when it can't be read."""
    try:
        return manifest.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StoreError(f"its manifest {manifest} cannot be read: {error.strerror}") from error


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        log.warning("%s cannot be read: %s", folder, error.strerror)
        return []


def _walk(manifests: Path) -> Iterator[tuple[Name, Path]]:
    """Every manifest file at its four levels."""
    for host in _scan(manifests):
        for namespace in _scan(Path(host.path)):
            for model in _scan(Path(namespace.path)):
                for tag in _scan(Path(model.path)):
                    name = Name.from_path(host.name, namespace.name, model.name, tag.name)
                    if name is not None and tag.is_file():
                        yield name, Path(tag.path)


def _locate(manifests: Path, wanted: Name) -> tuple[Name, Path] | None:
    """An existing manifest for a name: the exact spelling, else one that differs by case."""
    exact = manifests / wanted.path
    if exact.is_file() and exact.name in (entry.name for entry in _scan(exact.parent)):
        return wanted, exact
    folders = [manifests]
    for part in wanted.path.parts:
        folders = [
            Path(entry.path) for folder in folders for entry in _scan(folder) if entry.name.lower() == part.lower()
        ]
    for path in folders:
        name = Name.from_path(*path.relative_to(manifests).parts)
        if name is not None and path.is_file():
            return name, path
    return None


def _place(manifests: Path, wanted: Name) -> Path:
    """Where to write a name's manifest: over an existing spelling, part by part, so that cases never fork."""
    found = _locate(manifests, wanted)
    if found is not None:
        return found[1]
    path = manifests
    for part in wanted.path.parts:
        present = sorted(entry.name for entry in _scan(path) if entry.name.lower() == part.lower())
        path /= part if part in present or not present else present[0]
    return path


def _remove_empty(folder: Path, top: Path) -> None:
    """Remove a folder and its parents below `top` as long as they are empty."""
    while folder != top and top in folder.parents:
        try:
            folder.rmdir()
        except OSError:
            return
        folder = folder.parent
