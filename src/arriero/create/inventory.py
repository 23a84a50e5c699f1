"""What a safetensors model consists of: its tensors by name, each shard opened and validated once.

Files are given by their names in the folder that they came from; where their bytes lie is another matter (blobs).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from arriero.create.kinds import refuse, sniff
from arriero.errors import CheckpointError, InvalidRequest
from arriero.formats import json_text
from arriero.formats.safetensors import SafetensorsFile
from arriero.formats.safetensors_folder import DENSE, dense_modules

log = logging.getLogger(__name__)
INDEX = "model.safetensors.index.json"
MOST_BYTES = 256 << 20
"""Of a configuration or tokenizer file; the largest real ones have some tens of megabytes."""


@dataclass(frozen=True)
class Inventory:
    """All tensors by name with their shards, the configuration, and the files to keep beside them."""

    tensors: dict[str, SafetensorsFile]
    config: dict[str, Any]
    documents: dict[str, Path]
    """JSON files by name, the shard index left out."""
    texts: dict[str, Path]
    """`chat_template.jinja`, `tokenizer.model`."""


def take_inventory(files: Mapping[str, Path]) -> Inventory:
    """Open everything; raises InvalidRequest or CheckpointError that name the file as the client called it."""
    names = sorted(files)
    weights = [name for name in names if name.endswith(".safetensors")]
    documents = {name: files[name] for name in names if name.endswith(".json") and name != INDEX}
    texts = {name: files[name] for name in names if name.endswith(".jinja") or name == "tokenizer.model"}
    for name in names:
        if name not in documents and name not in texts and name not in weights and name != INDEX:
            raise InvalidRequest(
                f"unknown type of file {name!r}; a safetensors model is made of *.safetensors, *.json, "
                "chat_template.jinja and tokenizer.model"
            )
    if "config.json" not in files:
        raise InvalidRequest(f"config.json is missing; found {_some(names)}")
    for name, path in texts.items():
        _check_size(name, path)
    parsed = {name: _json(name, path) for name, path in documents.items()}
    config = parsed["config.json"]
    if not isinstance(config, dict):
        raise InvalidRequest("config.json must hold a JSON object")
    _check_matrices(documents, files, config)
    tensors = _indexed(files, weights) if INDEX in files else _plain(files, weights, names)
    tensors |= dense_modules({name: open_weights(name, files[name]) for name in weights if DENSE.fullmatch(name)})
    if not tensors:
        raise InvalidRequest(f"the model has no tensors; found {_some(names)}")
    return Inventory(tensors, config, documents, texts)


def _check_matrices(documents: Mapping[str, Path], files: Mapping[str, Path], config: Mapping[str, Any]) -> None:
    """Raise InvalidRequest for an EmbeddingGemma without a matrix behind its pooling that its modules name."""
    if "Gemma3TextModel" not in (config.get("architectures") or ()):
        return
    for name in documents:
        folder, found, _ = name.partition("_Dense/config.json")
        weights = f"{folder}_Dense/model.safetensors"
        if found and weights not in files:
            raise InvalidRequest(f"{weights} is missing: without it the model's vectors would be others")


def open_weights(name: str, path: Path) -> SafetensorsFile:
    """Open a shard under its own name; raises InvalidRequest for another kind of file, CheckpointError for damage."""
    kind = sniff(path)
    if kind not in ("safetensors", "unknown"):
        raise refuse(name, kind)
    try:
        return SafetensorsFile(path)
    except CheckpointError as error:
        raise CheckpointError(str(error).replace(str(path), name)) from None


def _plain(files: Mapping[str, Path], weights: list[str], names: list[str]) -> dict[str, SafetensorsFile]:
    chosen = [name for name in weights if name.startswith("model")]
    if not chosen:
        raise InvalidRequest(f"expected model.safetensors or shards of it (model-*.safetensors), found {_some(names)}")
    if "model.safetensors" in chosen and len(chosen) > 1:
        raise InvalidRequest(
            f"both model.safetensors and shards of it ({chosen[0]}, …) are there without {INDEX}, so it is not clear "
            "which is the model; remove one or add the index"
        )
    tensors: dict[str, SafetensorsFile] = {}
    for name in chosen:
        file = open_weights(name, files[name])
        for tensor in file.tensors:
            if tensor in tensors:
                other = next(n for n in chosen if files[n] == tensors[tensor].path)
                raise CheckpointError(f"tensor {tensor} is in both {other} and {name}")
            tensors[tensor] = file
    return tensors


def _indexed(files: Mapping[str, Path], weights: list[str]) -> dict[str, SafetensorsFile]:
    document = _json(INDEX, files[INDEX])
    mapping = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(mapping, dict) or not all(isinstance(shard, str) for shard in mapping.values()):
        raise CheckpointError(f"{INDEX} has no weight_map of tensor names to file names")
    shards: dict[str, SafetensorsFile] = {}
    for shard in sorted(set(mapping.values())):
        if not shard.endswith(".safetensors") or "/" in shard or "\\" in shard:
            raise CheckpointError(f"{INDEX} names {shard!r}, which is not a bare file name that ends .safetensors")
        if shard not in files:
            raise CheckpointError(
                f"incomplete source: shard {shard} named by {INDEX} is missing; found {_some(weights)}"
            )
        shards[shard] = open_weights(shard, files[shard])
    tensors: dict[str, SafetensorsFile] = {}
    for tensor, shard in mapping.items():
        if tensor not in shards[shard].tensors:
            where = next((name for name, file in shards.items() if tensor in file.tensors), None)
            raise CheckpointError(
                f"incomplete source: by {INDEX} tensor {tensor} is in {shard}, but "
                + (f"it is in {where}" if where else "it is in no shard")
            )
        tensors[tensor] = shards[shard]
    extra = [name for file in shards.values() for name in file.tensors if name not in tensors]
    if extra:
        log.warning("%d tensors are not in %s and are left out: %s", len(extra), INDEX, ", ".join(sorted(extra)[:5]))
    return tensors


def _json(name: str, path: Path) -> Any:
    kind = sniff(path)
    if kind in ("lfs", "empty"):
        raise refuse(name, kind)
    _check_size(name, path)
    try:
        return json_text.decode(path.read_bytes().removeprefix(b"\xef\xbb\xbf"))
    except (msgspec.DecodeError, RecursionError) as error:
        raise CheckpointError(f"{name} is not valid JSON: {error}") from None


def _check_size(name: str, path: Path) -> None:
    """These files are read as a whole."""
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise InvalidRequest(f"{name} has {size} bytes; at most {MOST_BYTES} are expected of a file of its kind")


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:8])
    return (f"{shown} and {len(names) - 8} more" if len(names) > 8 else shown) or "nothing"
