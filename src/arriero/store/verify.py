"""Checking what is stored: every blob is hashed again, every header and document is read again."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec

from arriero.errors import Cancelled, CheckpointError, NotFound, StoreError
from arriero.formats.gguf import GGUFFile
from arriero.formats.safetensors import SafetensorsFile
from arriero.store import manifests
from arriero.store.blobs import read_chunks
from arriero.store.manifests import DIGEST, Layer
from arriero.store.model import StoredModel
from arriero.store.store import Store

log = logging.getLogger(__name__)

Report = Callable[[dict[str, Any]], None]
_REPORT_EVERY = 64 << 20
"""Hashed bytes between two reports."""


def verify(store: Store, name: str, report: Report, stop: threading.Event, *, repair: bool = False) -> list[str]:
    """Everything that is wrong with a model ('' = with all that is stored), as sentences; blocking, for a thread.

    Each problem is a status with the field `problem`, the last status is `success` or `<n> problems`. `repair` deletes
    blobs whose bytes are not their name's, so that a pull fetches them again. Raises NotFound, InvalidRequest,
    Cancelled.
    """
    found: list[str] = []

    def problem(sentence: str) -> None:
        found.append(sentence)
        report({"status": sentence, "problem": sentence})

    models = [store.get(name)] if name else store.list()
    if not name:
        for sentence in store.unreadable():
            problem(sentence)
    with store.keeping():
        present: dict[str, tuple[StoredModel, Layer]] = {}
        for model in models:
            for layer in (*model.manifest.layers, model.manifest.config):
                if layer.digest in present:
                    continue
                try:
                    model.path(layer)
                except StoreError as error:
                    problem(str(error))
                else:
                    present[layer.digest] = (model, layer)
        total = sum(layer.size for _, layer in present.values())
        done = 0

        def step(count: int) -> None:
            if stop.is_set():
                raise Cancelled("the check was given up")
            report({"status": "verifying", "digest": "sha256:model", "total": total, "completed": done + count})

        for model, layer in present.values():
            if _intact(model, layer, step):
                sentence = content_problem(model, layer)
                if sentence:
                    problem(f"model '{model.name}': {sentence}")
            else:
                problem(
                    f"model '{model.name}': the bytes of {_what(layer)} are not those of its name; remove the blob "
                    "('arriero verify --repair'), then pull or create the model again"
                )
                if repair:
                    _remove(model, layer, problem)
            done += layer.size
        step(0)
        if not name:
            _check_unused(store, present.keys(), problem, repair=repair)
    if not found:
        report({"status": "success"})
    else:
        report({"status": f"{len(found)} problem{'s' if len(found) > 1 else ''}"})
    return found


def content_problem(model: StoredModel, layer: Layer) -> str:
    """What is wrong inside a blob whose bytes are right, '' when nothing is."""
    try:
        if layer.media_type == manifests.TENSOR:
            tensors = SafetensorsFile(model.path(layer)).tensors
            if not any(name == layer.name or name.startswith(f"{layer.name}.") for name in tensors):
                return f"{_what(layer)} holds {', '.join(sorted(tensors)[:3])} and not what its layer is called"
        elif layer.media_type in (manifests.MODEL, manifests.PROJECTOR, manifests.ADAPTER, manifests.DRAFT):
            GGUFFile(model.path(layer))
        elif layer.media_type in (manifests.JSON, manifests.PARAMS, manifests.MESSAGES):
            msgspec.json.decode(model.read(layer))
    except (CheckpointError, StoreError) as error:
        return str(error)
    except (msgspec.MsgspecError, RecursionError) as error:
        return f"{_what(layer)} is not valid JSON: {error}"
    return ""


def _what(layer: Layer) -> str:
    return f"blob {layer.digest}" + (f" ({layer.name})" if layer.name else "")


def _intact(model: StoredModel, layer: Layer, step: Callable[[int], None]) -> bool:
    hasher, count, told = hashlib.sha256(), 0, 0
    step(0)
    try:
        for chunk in read_chunks(model.path(layer)):
            hasher.update(chunk)
            count += len(chunk)
            if count - told >= _REPORT_EVERY:
                told = count
                step(count)
    except OSError as error:
        log.warning("%s cannot be read: %s", _what(layer), error.strerror)
        return False
    return f"sha256:{hasher.hexdigest()}" == layer.digest


def _check_unused(store: Store, used: AbstractSet[str], problem: Callable[[str], None], *, repair: bool) -> None:
    """Blobs of our own root that no model uses: a later pull would take them as they are."""
    for entry in store.blobs.files():
        if not DIGEST.fullmatch(entry.name) or entry.name.replace("-", ":") in used:
            continue
        try:
            intact = store.blobs.intact(entry.name)
        except (NotFound, OSError):
            continue  # gone, or replaced, while we looked
        if not intact:
            problem(f"blob {entry.name}: its bytes are not those of its name; no model uses it")
            if repair:
                store.blobs.remove(entry.name)


def _remove(model: StoredModel, layer: Layer, problem: Callable[[str], None]) -> None:
    """Delete a damaged blob where that is ours to do."""
    if model.read_only:
        problem(f"{_what(layer)} stays: the store at {model.blobs.folder} is only read")
        return
    model.blobs.remove(layer.digest)
