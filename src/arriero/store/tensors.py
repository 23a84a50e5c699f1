"""The tensors of a stored model as `show` lists them: each by itself, and those of one kind of layer together."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from arriero.errors import CheckpointError, StoreError
from arriero.formats.gguf import GGUFFile
from arriero.formats.safetensors import SafetensorsFile, TensorSpan
from arriero.source import GGUFSource
from arriero.store import manifests
from arriero.store.manifests import is_draft
from arriero.store.model import StoredModel

BITS = {"int2": 2, "int3": 3, "int4": 4, "int5": 5, "int6": 6, "int8": 8, "nvfp4": 4, "mxfp4": 4, "mxfp8": 8}
"""Packed types of tensor layers."""
_RATIOS = {64: "nvfp4", 128: "mxfp4", 256: "mxfp8"}
"""Packed bits for each 8-bit scale → kind."""
_COMPANIONS = (".scale", ".bias", ".global_scale")
NUMBER = re.compile(r"(?<=[._])\d+(?=\.)")
"""What the names of tensors of one kind of layer differ by."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One logical tensor, its scales and zero points counted in."""

    name: str
    type: str
    shape: list[int]
    """Of its numbers, not of its words; a GGUF file's in that file's order, the columns first."""
    nbytes: int

    @property
    def parameters(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors of one type whose names differ by numbers only."""

    name: str
    """With `*` for each number."""
    type: str
    count: int
    parameters: int
    nbytes: int


def tensors(model: StoredModel, *, draft: bool = False) -> list[StoredTensor]:
    """Every logical tensor of the model, or of the draft beside it, sorted by name; raises StoreError."""
    source = model.source()
    try:
        if isinstance(source, GGUFSource) and not draft:
            return [
                StoredTensor(tensor.name, tensor.type.name, list(reversed(tensor.shape)), tensor.nbytes)
                for path in source.paths
                for tensor in GGUFFile(path).tensors.values()
            ]
        found = [
            entry
            for layer in model.manifest.of(manifests.TENSOR)
            if is_draft(layer) is draft
            for entry in _logical(SafetensorsFile(model.path(layer)))
        ]
    except CheckpointError as error:
        raise StoreError(f"model '{model.name}' is damaged: {error}") from None
    return sorted(found, key=lambda entry: entry.name)


def tensor_groups(listed: list[StoredTensor]) -> list[TensorGroup]:
    """Tensors by kind of layer and type, sorted by name."""
    found: dict[tuple[str, str], list[int]] = {}
    for entry in listed:
        sums = found.setdefault((NUMBER.sub("*", entry.name), entry.type), [0, 0, 0])
        for i, number in enumerate((1, entry.parameters, entry.nbytes)):
            sums[i] += number
    return [TensorGroup(name, kind, *sums) for (name, kind), sums in sorted(found.items())]


def _logical(file: SafetensorsFile) -> list[StoredTensor]:
    """The tensors of one layer's file, packed ones with their logical shape, their companions with them."""
    spans = file.tensors
    entries = []
    for name, span in spans.items():
        stem = next((name.removesuffix(end) for end in _COMPANIONS if name.endswith(end)), None)
        if stem in spans and f"{stem}.scale" in spans:
            continue
        scale = spans.get(f"{name}.scale")
        if scale is None or not span.shape or not scale.shape:
            entries.append(StoredTensor(name, span.dtype, list(span.shape), span.nbytes))
            continue
        kind = file.metadata.get(f"{name}.quant_type") or file.metadata.get("quant_type") or _guess(span, scale)
        columns = span.shape[-1] * 32 // BITS.get(kind.lower(), 4)
        nbytes = span.nbytes + sum(spans[name + end].nbytes for end in _COMPANIONS if name + end in spans)
        entries.append(StoredTensor(name, kind, [*span.shape[:-1], columns], nbytes))
    return entries


def _guess(span: TensorSpan, scale: TensorSpan) -> str:
    """The kind of a packed tensor whose file doesn't say: packed bits for each scale."""
    ratio = span.shape[-1] * 32 // max(1, scale.shape[-1])
    if scale.dtype == "U8":
        return _RATIOS.get(ratio, "mxfp4")
    return "int8" if ratio >= 512 else "int4"
