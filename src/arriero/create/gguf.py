"""GGUF files at import: checked as a load would check them, and described for the configuration blob."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arriero.chat.files import TextFiles
from arriero.errors import CheckpointError, InvalidRequest, UnsupportedArchitecture, UnsupportedFeature
from arriero.formats.gguf import GGUFFile, open_shards
from arriero.formats.gguf_repack import repackable
from arriero.model.architectures import check_config
from arriero.model.gguf_config import architecture_of, config_of

FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 4: "MXFP4", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S",
    12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS",
    20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M",
    28: "IQ2_S", 29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4",
}  # fmt: skip
"""`general.file_type` → the name of the mixture of tensor types."""


@dataclass(frozen=True)
class GGUFModel:
    """A GGUF model that will load: its files in order, and what its header says."""

    files: list[str]
    """The client's names, the first part first."""
    architecture: str
    parameters: int
    file_type: str
    context_length: int
    embedding_length: int
    text: TextFiles
    """The tokenizer and the chat template in the header."""
    parts: list[GGUFFile]
    """The opened files, in order."""
    config: dict[str, Any]
    """What the header says as Hugging Face would."""


def read_gguf(files: Mapping[str, Path]) -> GGUFModel:
    """Open and check all parts of one model, given by the client's names.

    Raises InvalidRequest, CheckpointError, UnsupportedArchitecture or UnsupportedFeature; messages use those names.
    """
    names = {str(path): name for name, path in files.items()}
    try:
        opened = {name: GGUFFile(path) for name, path in files.items()}
        for name, file in opened.items():
            _check_role(name, file)
        ordered = sorted(opened, key=lambda name: (_number(opened[name].metadata.get("split.no")), name))
        parts = open_shards([files[name] for name in ordered])
        config = config_of(parts)
        check_config(config)
        _check_tensors(parts)
    except (CheckpointError, UnsupportedArchitecture) as error:
        text = str(error)
        for path, name in names.items():
            text = text.replace(path, name)
        raise type(error)(text) from None
    architecture = architecture_of(parts[0])
    metadata = parts[0].metadata
    return GGUFModel(
        files=ordered,
        architecture=architecture,
        parameters=sum(math.prod(tensor.shape) for part in parts for tensor in part.tensors.values()),
        file_type=_file_type(parts),
        context_length=_number(metadata.get(f"{architecture}.context_length")),
        embedding_length=_number(metadata.get(f"{architecture}.embedding_length")),
        text=TextFiles({}, metadata),
        parts=parts,
        config=config,
    )


def _check_role(name: str, file: GGUFFile) -> None:
    kind, architecture = file.metadata.get("general.type"), file.metadata.get("general.architecture")
    if architecture == "clip" or kind in ("mmproj", "projector"):
        raise UnsupportedFeature(
            f"{name} is a projector for images or audio, which arriero does not run with GGUF models yet; leave it out"
        )
    if kind == "adapter":
        raise UnsupportedFeature(f"{name} is a LoRA adapter, which is not supported yet; merge it into the weights")
    if kind not in (None, "model"):
        raise InvalidRequest(f"{name} is a GGUF file of type {kind!r}, expected a model")


def _check_tensors(parts: list[GGUFFile]) -> None:
    for part in parts:
        for tensor in part.tensors.values():
            if not tensor.type.plain and not repackable(tensor.type):
                raise CheckpointError(
                    f"{part.path}: tensor {tensor.name} is stored as {tensor.type.name}, which arriero cannot run; "
                    "use a model of another quantisation"
                )


def _file_type(parts: list[GGUFFile]) -> str:
    declared = parts[0].metadata.get("general.file_type")
    if isinstance(declared, int) and declared in FILE_TYPES:
        return FILE_TYPES[declared]
    sizes: Counter[str] = Counter()
    for part in parts:
        for tensor in part.tensors.values():
            sizes[tensor.type.name] += tensor.nbytes
    return sizes.most_common(1)[0][0] if sizes else ""


def _number(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0
