"""The client's half of `create`: what a Modelfile's FROM means on this machine, as files to upload and a request body.

Refuses to know the server and the store. What the server would refuse at once (an architecture that nobody knows, a
file that is no model) is refused here already, before gigabytes are hashed and sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from arriero.create.fields import fields_of
from arriero.create.kinds import refuse, sniff
from arriero.errors import InvalidRequest, UnsupportedFeature
from arriero.modelfile import Modelfile

INDEX = "model.safetensors.index.json"
_BESIDE = ("*.json", "chat_template.jinja", "tokenizer.model", "[0-9]*_*/config.json")
"""The last are the modules of an embedding model: `1_Pooling`."""
_GROUPS = (
    "model*.safetensors",
    "*.gguf",
    "consolidated*.safetensors",
    "pytorch_model*.bin",
    "consolidated*.pth",
    "*.bin",
)
"""Weights of a folder: the first pattern that finds something wins; the later ones are there to be explained."""
_WEIGHTS = (".gguf", ".safetensors", ".bin", ".pth")


@dataclass(frozen=True)
class Gathered:
    """What to send: blobs first, then the body (the caller adds `model`)."""

    uploads: dict[str, Path] = field(default_factory=dict)
    """Digest → file."""
    body: dict[str, Any] = field(default_factory=dict)


def gather(modelfile: Modelfile, folder: Path, hashed: Callable[[str, int, int], None] | None = None) -> Gathered:
    """Resolve a Modelfile that lies in `folder`; reads and hashes every file that is sent.

    `hashed` is told a file's name, its bytes hashed so far, and their number. Raises InvalidRequest saying what was
    found and what was expected (`insecure path` for a link that leaves its folder), UnsupportedFeature for ADAPTER
    and DRAFT, ModelfileError for a parameter.
    """
    body = fields_of(modelfile)
    name, files = sources(modelfile, folder)
    if name is not None:
        return Gathered({}, body | {"from": name})
    digests = {name: _digest(name, path, hashed) for name, path in files.items()}
    return Gathered({digests[name]: path for name, path in files.items()}, body | {"files": digests})


def sources(modelfile: Modelfile, folder: Path) -> tuple[str | None, dict[str, Path]]:
    """What FROM means: a model's name, or files by the names that they are sent under; raises as `gather` does."""
    for name in ("adapter", "draft"):
        if modelfile.all(name):
            raise UnsupportedFeature(
                f"{name.upper()} is not supported yet; leave it out (adapters: merge into the weights)"
            )
    files: dict[str, Path] = {}
    names: list[str] = []
    for text in modelfile.all("from"):
        path = _resolve(text, folder)
        if path is None:
            names.append(text)
            continue
        for name, file in _weights_at(text, path).items():
            if name in files and files[name] != file:
                raise InvalidRequest(f"two FROM lines give a file named {name}: {files[name]} and {file}")
            files[name] = file
    if len(names) > 1 or (names and files):
        raise InvalidRequest(
            f"FROM {names[0]} names a model, so it must be the only FROM; several FROM lines must all be files"
        )
    if names:
        return names[0], {}
    _check_early(files)
    return None, files


def _resolve(text: str, folder: Path) -> Path | None:
    """The file or folder that FROM means, or None when it is a model's name."""
    try:
        path = folder / Path(text).expanduser()
        if path.exists():
            # The name as given: that of a link tells more (a shard's number) than its target's in a cache of hashes.
            return path.absolute()
    except (OSError, RuntimeError, ValueError) as error:
        raise InvalidRequest(f"FROM {text} cannot be read: {error}") from None
    if path.is_symlink():
        raise InvalidRequest(f"FROM {text} is a link to {path.readlink()}, which does not exist")
    if text.startswith((".", "/", "~")) or text.endswith(_WEIGHTS) or "\\" in text:
        raise InvalidRequest(f"FROM {text}: there is no file or folder at {path}")
    return None


def _weights_at(text: str, path: Path) -> dict[str, Path]:
    """Name → file of everything that a file or folder brings in."""
    if path.is_dir():
        return _folder(text, path.resolve())
    if path.name == INDEX:
        return _folder(text, path.parent.resolve())
    kind = sniff(path)
    if kind == "gguf":
        return _gguf_parts(path)
    if kind != "safetensors":
        raise refuse(f"FROM {text}", kind)
    return _single_safetensors(text, path)


def _folder(text: str, folder: Path) -> dict[str, Path]:
    group = next((pattern for pattern in _GROUPS if any(folder.glob(pattern))), None)
    if group is None:
        found = sorted(entry.name for entry in folder.iterdir())
        below = next((path for path in sorted(folder.glob("*/model*.safetensors"))), None)
        hint = f"; {below.parent.name}/ holds {below.name}: FROM that folder instead" if below else ""
        raise InvalidRequest(
            f"FROM {text}: no model in {folder}: found {', '.join(found[:8]) or 'nothing'}, expected config.json with "
            f"model*.safetensors, or a .gguf file{hint}"
        )
    weights = {path.name: _inside(path, folder) for path in sorted(folder.glob(group))}
    kinds = {name: sniff(path) for name, path in weights.items()}
    if group.startswith("consolidated") and group.endswith(".safetensors"):
        raise InvalidRequest(
            f"FROM {text}: {next(iter(weights))} has its maker's own tensor names; "
            "use the repository's model*.safetensors with config.json"
        )
    wanted = "safetensors" if group.endswith(".safetensors") else "gguf"
    for name, kind in kinds.items():
        if kind != wanted:
            raise refuse(f"FROM {text}: {name}", kind)
    if wanted == "gguf":
        parts = _gguf_parts(folder / next(iter(weights)))
        others = sorted(weights.keys() - parts.keys())
        if others:
            raise InvalidRequest(
                f"FROM {text}: {folder} holds several GGUF models ({', '.join(sorted(weights)[:8])}); FROM one of them"
            )
        return parts
    if "config.json" not in (entry.name for entry in folder.iterdir()):
        raise InvalidRequest(f"FROM {text}: {folder} has {next(iter(weights))} but no config.json beside it")
    return weights | _beside(folder)


def _beside(folder: Path) -> dict[str, Path]:
    return {
        path.relative_to(folder).as_posix(): _inside(path, folder)
        for pattern in _BESIDE
        for path in sorted(folder.glob(pattern))
    }


def _single_safetensors(text: str, path: Path) -> dict[str, Path]:
    """One safetensors file as a whole model, with the configuration beside it; a shard of several is refused."""
    beside = _beside(path.parent.resolve())
    if "config.json" not in beside:
        raise InvalidRequest(
            f"FROM {text}: there is no config.json beside it; FROM needs the model's whole folder (config.json, "
            "tokenizer.json and the safetensors files)"
        )
    index = beside.pop(INDEX, None)
    if index is not None and path.name.encode() in index.read_bytes():
        raise InvalidRequest(f"FROM {text} is one of several files of a model; use its folder: FROM {path.parent}")
    return {"model.safetensors": path.resolve(), **beside}


def _gguf_parts(path: Path) -> dict[str, Path]:
    from arriero.formats.gguf import shard_paths

    return {part.name: part.resolve() for part in shard_paths(path)}


def _inside(path: Path, folder: Path) -> Path:
    """The real file, which must lie in the folder; Hugging Face's cache keeps it in `blobs/` of the same repository."""
    real = path.resolve()
    allowed = [folder]
    if folder.parent.name == "snapshots":
        allowed.append(folder.parent.parent / "blobs")
    if not any(real.is_relative_to(place) for place in allowed):
        raise InvalidRequest(f"insecure path: {path} is a link to {real}, outside of {folder}")
    if not real.is_file():
        raise InvalidRequest(f"{path} is not a file that can be read")
    return real


def _check_early(files: Mapping[str, Path]) -> None:
    """Refuse an unknown architecture and a damaged GGUF header now; the rest is the server's to check."""
    from arriero.formats import json_text
    from arriero.model.architectures import check_config

    if "config.json" in files:
        try:
            config = json_text.decode(files["config.json"].read_bytes(), dict[str, Any])
        except (msgspec.MsgspecError, RecursionError) as error:
            raise InvalidRequest(f"{files['config.json']} is not a JSON object: {error}") from None
        check_config(config)
        return
    from arriero.create.gguf import read_gguf

    read_gguf(files)


def _digest(name: str, path: Path, hashed: Callable[[str, int, int], None] | None) -> str:
    total, done = path.stat().st_size, 0
    hasher = hashlib.sha256()
    for piece in _pieces(path):
        hasher.update(piece)
        done += len(piece)
        if hashed is not None:
            hashed(name, done, total)
    return f"sha256:{hasher.hexdigest()}"


def _pieces(path: Path) -> Iterable[bytes]:
    try:
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                yield piece
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}") from None
