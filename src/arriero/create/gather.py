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
_BESIDE = ("*.json", "chat_template.jinja", "tokenizer.model", "[0-9]*_*/config.json", "[0-9]*_Dense/model.safetensors")
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
    found and what was expected (`insecure path` for a link that leaves its folder), UnsupportedFeature for an adapter
    or a draft of another format, ModelfileError for a parameter.
    """
    body = fields_of(modelfile)
    name, files = sources(modelfile, folder)
    draft_name, draft_files = draft_sources(modelfile, folder)
    sets = {"files": files, "adapters": adapter_files(modelfile, folder), "draft_files": draft_files}
    uploads: dict[str, Path] = {}
    for field_name, found in sets.items():
        digests = {file: _digest(file, path, hashed) for file, path in found.items()}
        uploads |= {digests[file]: path for file, path in found.items()}
        if digests:
            body[field_name] = digests
    if name is not None:
        body["from"] = name
    if draft_name is not None:
        body["draft"] = draft_name
    return Gathered(uploads, body)


def sources(modelfile: Modelfile, folder: Path) -> tuple[str | None, dict[str, Path]]:
    """What FROM means: a model's name, or files by the names that they are sent under; raises as `gather` does."""
    files: dict[str, Path] = {}
    names: list[str] = []
    for text in modelfile.all("from"):
        path = _resolve(f"FROM {text}", text, folder)
        if path is None:
            names.append(text)
            continue
        for name, file in _weights_at(f"FROM {text}", path).items():
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


def draft_sources(modelfile: Modelfile, folder: Path) -> tuple[str | None, dict[str, Path]]:
    """What DRAFT means, as `sources` says of FROM; neither name nor files where there is none."""
    texts = modelfile.all("draft")
    if not texts:
        return None, {}
    if len(texts) > 1:
        raise InvalidRequest(f"DRAFT {texts[0]} and DRAFT {texts[1]}: a model has one draft")
    said = f"DRAFT {texts[0]}"
    path = _resolve(said, texts[0], folder)
    if path is None:
        return texts[0], {}
    files = _weights_at(said, path)
    if "config.json" not in files:
        raise UnsupportedFeature(
            f"{said} is a GGUF file; drafts that arriero runs are safetensors folders (docs/drafts.md)"
        )
    from arriero.model.drafts import check_config

    check_config(_object(files["config.json"]))
    return None, files


def adapter_files(modelfile: Modelfile, folder: Path) -> dict[str, Path]:
    """The files of ADAPTER, a folder or the weights in it, by the names that they are sent under."""
    from arriero.create.adapter import CONFIG, WEIGHTS, open_adapter

    texts = modelfile.all("adapter")
    if not texts:
        return {}
    if len(texts) > 1:
        raise InvalidRequest(f"ADAPTER {texts[0]} and ADAPTER {texts[1]}: only one adapter is currently supported")
    said = f"ADAPTER {texts[0]}"
    path = _resolve(said, texts[0], folder)
    if path is None:
        raise InvalidRequest(f"{said}: there is no file or folder at {folder / texts[0]}")
    inside = path if path.is_dir() else path.parent
    # mlx-lm leaves the states of its way beside the last one.
    names = (WEIGHTS if path.is_dir() else (path.name,)) + (CONFIG,)
    real = inside.resolve()
    files = {name: _inside(real / name, real) for name in names if (inside / name).exists()}
    open_adapter(files)
    return files


def _resolve(said: str, text: str, folder: Path) -> Path | None:
    """The file or folder that an instruction means, or None when it is a model's name."""
    try:
        path = folder / Path(text).expanduser()
        if path.exists():
            # The name as given: that of a link tells more (a shard's number) than its target's in a cache of hashes.
            return path.absolute()
    except (OSError, RuntimeError, ValueError) as error:
        raise InvalidRequest(f"{said} cannot be read: {error}") from None
    if path.is_symlink():
        raise InvalidRequest(f"{said} is a link to {path.readlink()}, which does not exist")
    if text.startswith((".", "/", "~")) or text.endswith(("/", *_WEIGHTS)) or "\\" in text:
        raise InvalidRequest(f"{said}: there is no file or folder at {path}")
    return None


def _verb(said: str) -> str:
    return said.partition(" ")[0]


def _weights_at(said: str, path: Path) -> dict[str, Path]:
    """Name → file of everything that a file or folder brings in."""
    if path.is_dir():
        return _folder(said, path.resolve())
    if path.name == INDEX:
        return _folder(said, path.parent.resolve())
    kind = sniff(path)
    if kind == "gguf":
        return _gguf_parts(path)
    if kind != "safetensors":
        raise refuse(f"{said}", kind)
    return _single_safetensors(said, path)


def _folder(said: str, folder: Path) -> dict[str, Path]:
    group = next((pattern for pattern in _GROUPS if any(folder.glob(pattern))), None)
    if group is None:
        found = sorted(entry.name for entry in folder.iterdir())
        below = next((path for path in sorted(folder.glob("*/model*.safetensors"))), None)
        hint = f"; {below.parent.name}/ holds {below.name}: {_verb(said)} that folder instead" if below else ""
        raise InvalidRequest(
            f"{said}: no model in {folder}: found {', '.join(found[:8]) or 'nothing'}, expected config.json with "
            f"model*.safetensors, or a .gguf file{hint}"
        )
    weights = {path.name: _inside(path, folder) for path in sorted(folder.glob(group))}
    kinds = {name: sniff(path) for name, path in weights.items()}
    if group.startswith("consolidated") and group.endswith(".safetensors"):
        raise InvalidRequest(
            f"{said}: {next(iter(weights))} has its maker's own tensor names; "
            "use the repository's model*.safetensors with config.json"
        )
    wanted = "safetensors" if group.endswith(".safetensors") else "gguf"
    for name, kind in kinds.items():
        if kind != wanted:
            raise refuse(f"{said}: {name}", kind)
    if wanted == "gguf":
        parts = _gguf_parts(folder / next(iter(weights)))
        others = sorted(weights.keys() - parts.keys())
        if others:
            raise InvalidRequest(
                f"{said}: {folder} holds several GGUF models ({', '.join(sorted(weights)[:8])}); "
                f"{_verb(said)} one of them"
            )
        return parts
    if "config.json" not in (entry.name for entry in folder.iterdir()):
        raise InvalidRequest(f"{said}: {folder} has {next(iter(weights))} but no config.json beside it")
    return weights | _beside(folder)


def _beside(folder: Path) -> dict[str, Path]:
    return {
        path.relative_to(folder).as_posix(): _inside(path, folder)
        for pattern in _BESIDE
        for path in sorted(folder.glob(pattern))
    }


def _single_safetensors(said: str, path: Path) -> dict[str, Path]:
    """One safetensors file as a whole model, with the configuration beside it; a shard of several is refused."""
    beside = _beside(path.parent.resolve())
    if "config.json" not in beside:
        raise InvalidRequest(
            f"{said}: there is no config.json beside it; {_verb(said)} needs the model's whole folder (config.json, "
            "tokenizer.json and the safetensors files)"
        )
    index = beside.pop(INDEX, None)
    if index is not None and path.name.encode() in index.read_bytes():
        raise InvalidRequest(f"{said} is one of several files of a model; use its folder: {_verb(said)} {path.parent}")
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
    from arriero.create.draft import refuse_alone
    from arriero.model.architectures import check_config

    if "config.json" in files:
        config = _object(files["config.json"])
        refuse_alone(config)
        check_config(config)
        return
    from arriero.create.gguf import read_gguf

    read_gguf(files)


def _object(path: Path) -> dict[str, Any]:
    from arriero.formats import json_text

    try:
        found: dict[str, Any] = json_text.decode(path.read_bytes(), dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidRequest(f"{path} is not a JSON object: {error}") from None
    return found


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
