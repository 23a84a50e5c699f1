"""Which safetensors files of a folder make up the model, with or without a shard index."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path

from arriero.errors import CheckpointError
from arriero.formats.mapped import REPAIR, SHOWN
from arriero.formats.safetensors import SafetensorsFile

INDEX = "model.safetensors.index.json"

DENSE = re.compile(r"(\d{1,3})_Dense/model\.safetensors")
"""The matrices that sentence-transformers puts behind a pooling, each in a folder of its own."""

logger = logging.getLogger(__name__)


def open_folder(folder: str | Path) -> dict[str, SafetensorsFile]:
    """Tensor name → its opened file, for `model.safetensors`, `model-*.safetensors` or an indexed set.

    Files of other names (`consolidated*.safetensors`) are not part of the model. Raises CheckpointError for a missing
    shard or tensor, a shard name with a path in it, a tensor in two files, or an ambiguous folder.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: expected a folder with config.json and *.safetensors, found none")
    tensors = _indexed(folder) if (folder / INDEX).exists() else _plain(folder)
    beside = {path.relative_to(folder).as_posix(): path for path in folder.glob("[0-9]*_Dense/model.safetensors")}
    return tensors | dense_modules({name: SafetensorsFile(path) for name, path in beside.items()})


def dense_modules(files: Mapping[str, SafetensorsFile]) -> dict[str, SafetensorsFile]:
    """Tensor name → its file, for those of `files` that are matrices behind a pooling: `dense.0.weight` and so on."""
    found = sorted(
        ((int(match[1]), files[name]) for name in files if (match := DENSE.fullmatch(name))), key=lambda pair: pair[0]
    )
    tensors: dict[str, SafetensorsFile] = {}
    for index, (_, file) in enumerate(found):
        renamed = file.renamed({f"linear.{kind}": f"dense.{index}.{kind}" for kind in ("weight", "bias")})
        tensors |= dict.fromkeys(renamed.tensors, renamed)
    return tensors


def _plain(folder: Path) -> dict[str, SafetensorsFile]:
    names = sorted(path.name for path in folder.glob("model*.safetensors"))
    if not names:
        found = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
        raise CheckpointError(f"{folder}: expected model.safetensors or shards of it, found {found}")
    if "model.safetensors" in names and len(names) > 1:
        raise CheckpointError(
            f"{folder}: both model.safetensors and shards ({names[1]}, …) without {INDEX}: "
            "it is not clear which is the model; remove one or add the index"
        )
    tensors: dict[str, SafetensorsFile] = {}
    for name in names:
        file = SafetensorsFile(folder / name)
        for tensor in file.tensors:
            if tensor in tensors:
                raise CheckpointError(
                    f"{folder}: tensor {tensor:.{SHOWN}} is in both {tensors[tensor].path.name} and {name}"
                )
            tensors[tensor] = file
    return tensors


def _indexed(folder: Path) -> dict[str, SafetensorsFile]:
    index = folder / INDEX
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index}: not a shard index with a weight_map ({error!r})") from error
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map must map tensor names to file names")
    files: dict[str, SafetensorsFile] = {}
    for shard in sorted(set(weight_map.values())):
        if not shard.endswith(".safetensors") or "/" in shard or "\\" in shard or "\0" in shard:
            raise CheckpointError(f"{index}: {shard!r:.{SHOWN}} is not a bare file name ending .safetensors")
        if not _there(folder / shard):
            raise CheckpointError(f"{folder}: shard {shard:.{SHOWN}} named by {INDEX} is missing; {REPAIR}")
        files[shard] = SafetensorsFile(folder / shard)
    tensors: dict[str, SafetensorsFile] = {}
    for name, shard in weight_map.items():
        if name not in files[shard].tensors:
            raise CheckpointError(
                f"{folder}: tensor {name:.{SHOWN}} should be in {shard:.{SHOWN}} by {INDEX} but is not; {REPAIR}"
            )
        tensors[name] = files[shard]
    extra = [name for file in files.values() for name in file.tensors if name not in weight_map]
    if extra:
        logger.warning("%s: %d tensors are not in %s and stay unused: %s", folder, len(extra), INDEX, extra[:5])
    return tensors


def _there(path: Path) -> bool:
    """Whether there is a file; a name that no file can have (too long, half a character) is none."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False
