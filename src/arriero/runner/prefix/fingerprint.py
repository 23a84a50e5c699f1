"""What stored prefixes may be shared between: one model's bytes, computed in one way.

Keys and values depend on the weights, the activations' type, and on what multiplied them, down to the last bit.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from arriero import __version__
from arriero.kernels.device import native
from arriero.runner.prefix.record import FORMAT
from arriero.source import FolderSource, GGUFSource, ModelSource

HEAD = 1 << 20
"""Bytes of a file that are read: enough for any header, which names all tensors and where they are."""


def fingerprint(
    source: ModelSource, dtype: str, device: str, prefill: str, draft: str = "", draft_source: ModelSource | None = None
) -> str:
    """The name of the folder of the stored prefixes of a model and its draft, whose caches are stored together.

    Files named by their own hash are known by it; others by their sizes, times of change and first bytes.
    """
    total = hashlib.blake2b(digest_size=16)
    kernels = native()
    how = (
        FORMAT,
        __version__,
        version("mlx"),
        dtype,
        device,
        prefill,
        draft,
        kernels.probe() if kernels is not None else "plain",
    )
    total.update(repr(how).encode())
    total.update(identity(source, draft_source).encode())
    return total.hexdigest()


def identity(source: ModelSource, draft_source: ModelSource | None = None) -> str:
    """What the files of a model and its draft are now. OSError when one can't be read."""
    total = hashlib.blake2b(digest_size=16)
    for path in [*_files(source), *(() if draft_source is None else _files(draft_source))]:
        total.update(_identity(path))
    return total.hexdigest()


def _files(source: ModelSource) -> Iterable[Path]:
    if isinstance(source, GGUFSource):
        return [*map(Path, source.paths), *(() if source.draft is None else _files(source.draft))]
    if isinstance(source, FolderSource):
        return sorted(path for path in Path(source.path).iterdir() if path.suffix in (".safetensors", ".json"))
    everything = {**source.tensors, **source.files}
    return [Path(everything[name]) for name in sorted(everything)]


def _identity(path: Path) -> bytes:
    if path.name.startswith("sha256-"):
        return path.name.encode()
    status = os.stat(path)
    with path.open("rb") as file:
        head = hashlib.blake2b(file.read(HEAD), digest_size=16).digest()
    return f"{path.name} {status.st_size} {status.st_mtime_ns}".encode() + head
