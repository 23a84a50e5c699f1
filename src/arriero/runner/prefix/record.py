"""One stretch of a stored prefix as a file: its keys, and what every cache held over it.

A safetensors file. `keys` are the stretch's; `<slot>.range.<keys|values>` and `<slot>.state.<i>` are the arrays of
the cache slots. The metadata say which positions they stand for, and carry a checksum of themselves and all arrays.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import mlx.core as mx
import numpy as np

from arriero.errors import CheckpointError
from arriero.formats.safetensors import SafetensorsFile
from arriero.model.contract import Snapshot
from arriero.runner.caches.snapshot import RangeSnapshot, StateSnapshot
from arriero.runner.prefix.keys import Keys

FORMAT = "arriero-prefix-2"

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class UnfitRecord(Exception):
    """A file that is damaged, or not of this model and format; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Record:
    """What is written: arrays on the host, and text."""

    tensors: Mapping[str, np.ndarray]
    metadata: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def make_record(keys: Keys, start: int, end: int, snapshots: Sequence[Snapshot | None], before: str) -> Record | None:
    """The record of positions `[start, end)`; None where a cache's snapshots can't be written.

    Waits for the arrays; the checksum is the writer's. `before` is the `digest` of the keys before the stretch.
    """
    if not all(snapshot is None or isinstance(snapshot, RangeSnapshot | StateSnapshot) for snapshot in snapshots):
        return None
    tensors: dict[str, np.ndarray] = {"keys": np.asarray(keys[start:end], np.uint64)}
    ends: dict[str, list[int]] = {}
    for slot, snapshot in enumerate(snapshots):
        if snapshot is None:
            continue
        if isinstance(snapshot, RangeSnapshot):
            first, last = snapshot.arrays()
            tensors[f"{slot}.range.keys"], tensors[f"{slot}.range.values"] = _host(first), _host(last)
        elif isinstance(snapshot, StateSnapshot):
            for i, array in enumerate(snapshot.arrays):
                tensors[f"{slot}.state.{i}"] = _host(array)
        ends[str(slot)] = [snapshot.start, snapshot.end]
    metadata = {
        "format": FORMAT,
        "before": before,
        "start": str(start),
        "end": str(end),
        "snapshots": json.dumps(ends),
    }
    return Record(tensors, metadata)


@dataclass(frozen=True, slots=True)
class Contents:
    """What a record's file holds, checked: views of the mapped file."""

    path: Path
    views: Mapping[str, np.ndarray]
    ends: Mapping[int, tuple[int, int]]
    """Of each slot, the positions that its snapshot stands for."""

    def snapshots(self, slots: int) -> list[Snapshot | None]:
        """As arrays of the device, on the array thread; raises UnfitRecord."""
        snapshots: list[Snapshot | None] = [None] * slots
        for slot, (start, end) in self.ends.items():
            if not 0 <= slot < slots:
                raise UnfitRecord(f"{self.path.name} is of a model with more caches")
            if f"{slot}.range.keys" in self.views:
                both = _device(self.views[f"{slot}.range.keys"]), _device(self.views[f"{slot}.range.values"])
                snapshots[slot] = RangeSnapshot(start, end, arrays=both)
            else:
                names = [name for name in self.views if name.startswith(f"{slot}.state.")]
                names.sort(key=lambda name: int(name.rsplit(".", 1)[1]))
                snapshots[slot] = StateSnapshot(end, [_device(self.views[name]) for name in names], compact=True)
        return snapshots


def read_contents(path: Path) -> Contents:
    """A record's file, checked byte for byte, on any thread; raises UnfitRecord, and FileNotFoundError."""
    try:
        file = SafetensorsFile(path)
        views = {name: file.view(name) for name in file.tensors}
        ends = {int(slot): (int(a), int(b)) for slot, (a, b) in json.loads(file.metadata["snapshots"]).items()}
        said = dict(file.metadata)
        wanted = said.pop("checksum")
    except (CheckpointError, OSError, KeyError, ValueError, TypeError, AttributeError) as error:
        if not path.exists():
            raise FileNotFoundError(f"{path} is gone") from error
        raise UnfitRecord(f"{path.name} cannot be read: {error}") from error
    if checksum(views, said) != wanted:
        raise UnfitRecord(f"{path.name} is damaged: its checksum is not that of its contents")
    return Contents(path, views, ends)


def digest(keys: Keys) -> str:
    """What names a history."""
    return history(keys).hexdigest()


def history(keys: Keys | None = None) -> hashlib.blake2b:
    """The hash behind `digest`, which later keys can be added to."""
    return hashlib.blake2b(b"" if keys is None else np.ascontiguousarray(keys, "<u8").data, digest_size=16)


def checksum(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> str:
    """Of names, shapes and bytes, and of what is said of them."""
    total = hashlib.blake2b(digest_size=16)
    total.update(json.dumps(sorted(metadata.items())).encode())
    for name in sorted(tensors):
        array = np.ascontiguousarray(tensors[name])
        total.update(f"{name} {array.dtype} {array.shape};".encode())
        total.update(array.view(np.uint8).reshape(-1).data if array.size else b"")
    return total.hexdigest()


def _host(array: mx.array) -> np.ndarray:
    if array.dtype == mx.bfloat16:
        return np.array(array.view(mx.uint16)).view(BFLOAT16)
    return np.array(array)


def _device(view: np.ndarray) -> mx.array:
    if view.dtype == BFLOAT16:
        return mx.array(view.view(np.uint16)).view(mx.bfloat16)
    return mx.array(view)
