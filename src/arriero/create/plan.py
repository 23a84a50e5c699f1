"""Which blobs a safetensors model becomes: one for each tensor, a packed one with its scales and zero points.

Every decision is made here; the writer only copies bytes. Weights keep the precision that they have.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from arriero.create.inventory import Inventory
from arriero.errors import CheckpointError, UnsupportedFeature
from arriero.formats.safetensors import BITS
from arriero.model.companions import Bundle, Part, bundle

log = logging.getLogger(__name__)

_FLOATS = ("F32", "BF16", "F16")
_GROUPS = (64, 32, 128)
"""MLX's group sizes of affine layouts, the usual one first."""
_AFFINE_BITS = (4, 8, 6, 5, 3, 2)
_FLOAT_LAYOUTS = {64: ("nvfp4", 4, 16), 128: ("mxfp4", 4, 32), 256: ("mxfp8", 8, 32)}
"""Packed bits for each scale → kind, bits, group size: each 8-bit-scaled layout has a ratio of its own."""
_NAMED = ("int4", "int8", "nvfp4", "mxfp4", "mxfp8")
"""Kinds that a blob's metadata can name; the others are read from config.json and the shapes."""


@dataclass(frozen=True)
class BlobPlan:
    """One tensor layer: its name, the parts that go into its file by key, and the file's metadata."""

    name: str
    parts: dict[str, Part]
    metadata: dict[str, str]
    elements: int
    """Numbers in the logical, unpacked tensor; 0 for a companion."""
    kind: str = ""
    """How it is packed; '' for plain numbers."""

    @property
    def nbytes(self) -> int:
        """Bytes of the parts, without the header."""
        return sum(part.span.nbytes for part in self.parts.values())


@dataclass(frozen=True)
class Plan:
    """All tensor layers, in the order of their names."""

    blobs: list[BlobPlan]

    @property
    def parameters(self) -> int:
        """Numbers in all logical tensors."""
        return sum(blob.elements for blob in self.blobs)

    @property
    def nbytes(self) -> int:
        """Bytes to copy."""
        return sum(blob.nbytes for blob in self.blobs)

    @property
    def file_type(self) -> str:
        """Quantisation as people call it: the narrowest packed kind, else the commonest element type."""
        packed = [blob.kind for blob in self.blobs if blob.kind]
        if packed:
            return min(packed, key=lambda kind: int("".join(filter(str.isdigit, kind))))
        counts: Counter[str] = Counter()
        for blob in self.blobs:
            for part in blob.parts.values():
                if part.span.dtype in _FLOATS:
                    counts[part.span.dtype] += part.span.nbytes * 8 // BITS[part.span.dtype]
        return counts.most_common(1)[0][0] if counts else ""


def make_plan(inventory: Inventory) -> Plan:
    """Plan the layers; raises CheckpointError, and UnsupportedFeature for a quantisation that isn't imported yet."""
    blobs: list[BlobPlan] = []
    for found in bundle(inventory.tensors):
        stem, _, last = found.name.rpartition(".")
        dtype = found.data.span.dtype
        # Integers that nobody scales would be taken for the weights themselves.
        codes = found.scales is None and dtype not in _FLOATS and (last == "weight" or dtype.startswith("F"))
        if found.refused is not None or codes:
            raise UnsupportedFeature(
                f"tensor {found.name} is stored as {dtype}, a quantisation that is not imported yet; "
                "use the BF16 weights, an NVFP4 or MLX conversion of the model, or a GGUF file"
            )
        if found.scales is None and last in ("scales", "biases"):
            _check_orphan(found.name, stem, inventory)
        elif found.scales is None:
            elements = math.prod(found.data.span.shape)
            blobs.append(BlobPlan(found.name, {found.name: found.data}, _origin([found.data]), elements))
        elif found.scales.span.name.endswith(".scales"):
            blobs.append(_packed(found, inventory.config))
        else:
            blobs.extend(_kept_apart(found))
    if not blobs:
        raise CheckpointError("the model has scales and zero points but no weights; convert it again")
    return Plan(sorted(blobs, key=lambda blob: blob.name))


def _packed(found: Bundle, config: Mapping[str, Any]) -> BlobPlan:
    """A tensor of an MLX conversion: `X.scales` and `X.biases` become `X.weight.scale` and `X.weight.bias`."""
    assert found.scales is not None
    if found.global_scale is not None:
        raise UnsupportedFeature(f"tensor {found.name} has a global scale in MLX's form, which is not imported yet")
    data, scales = found.data.span, found.scales.span
    words, groups = data.shape[-1] if data.shape else 0, scales.shape[-1] if scales.shape else 0
    if data.shape[:-1] != scales.shape[:-1] or not words or not groups or words * 32 % groups:
        raise CheckpointError(
            f"tensor {found.name} of packed shape {list(data.shape)} and its scales {list(scales.shape)} do not belong "
            "together; convert the model again"
        )
    parts = {found.name: found.data, f"{found.name}.scale": found.scales}
    if scales.dtype == "U8":
        if words * 32 // groups not in _FLOAT_LAYOUTS or found.biases is not None:
            raise CheckpointError(f"tensor {found.name} with 8-bit scales fits none of nvfp4, mxfp4, mxfp8")
        kind, bits, group = _FLOAT_LAYOUTS[words * 32 // groups]
    else:
        if found.biases is None or found.biases.span.shape != scales.shape:
            raise CheckpointError(f"tensor {found.name} has affine scales but no zero points (biases) of their shape")
        parts[f"{found.name}.bias"] = found.biases
        bits, group = _affine(found.name, words * 32 // groups, config)
        kind = f"int{bits}"
    metadata = {"quant_type": kind, "group_size": str(group)} if kind in _NAMED else {}
    return BlobPlan(found.name, parts, metadata | _origin(parts.values()), math.prod(data.shape) * 32 // bits, kind)


def _affine(name: str, product: int, config: Mapping[str, Any]) -> tuple[int, int]:
    """Bits and group size: as declared for the module, else the declared group size, else MLX's usual ones."""
    fitting = [(bits, group) for group in _GROUPS for bits in _AFFINE_BITS if bits * group == product]
    declared = _declared(name.removesuffix(".weight"), config)
    for bits, group in declared:
        if (bits, group) in fitting:
            return bits, group
    for _, group in declared:
        same_group = [pair for pair in fitting if pair[1] == group]
        if same_group:
            return same_group[0]
    if not fitting:
        raise CheckpointError(
            f"the shapes of tensor {name} and its scales fit no affine layout; convert the model again"
        )
    return min(fitting, key=lambda pair: (pair[0] == 2, _GROUPS.index(pair[1])))


def _declared(module: str, config: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(bits, group size) that config.json gives for a module, then for the model."""
    section = config.get("quantization") or config.get("quantization_config")
    if not isinstance(section, Mapping):
        return []
    own = section.get(module)
    entries = [{**section, **own}, section] if isinstance(own, Mapping) else [section]
    pairs = [(entry.get("bits"), entry.get("group_size")) for entry in entries]
    return [(bits, group) for bits, group in pairs if isinstance(bits, int) and isinstance(group, int)]


def _kept_apart(found: Bundle) -> list[BlobPlan]:
    """A tensor of a producer whose spelling the loader reads as it is: every part a layer under its own name."""
    assert found.scales is not None
    words = found.data.span.nbytes // 4
    ratio = found.data.span.nbytes * 8 // max(1, math.prod(found.scales.span.shape))
    kind, bits, _ = _FLOAT_LAYOUTS.get(ratio, ("", 8, 0))
    if not kind:
        raise UnsupportedFeature(f"tensor {found.name} is packed in a layout that is not imported yet")
    blobs = []
    for part in found.parts:
        first = part is found.data
        elements = words * 32 // bits if first else 0
        blobs.append(BlobPlan(part.span.name, {part.span.name: part}, {}, elements, kind if first else ""))
    return blobs


def _origin(parts: Iterable[Part]) -> dict[str, str]:
    """MLX conversions say so in their files; some tensors are laid out otherwise there, so the blobs say it too."""
    return {"format": "mlx"} if any(part.file.metadata.get("format") == "mlx" for part in parts) else {}


def _check_orphan(name: str, stem: str, inventory: Inventory) -> None:
    """Scales without their weight: left out for a tied output head, where conversions forget them, else refused."""
    config = inventory.config
    text = config.get("text_config")
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings") if isinstance(text, dict) else None)
    missing = f"{stem}.weight" not in inventory.tensors
    if missing and stem.rpartition(".")[2] == "lm_head" and tied is not False:
        log.warning("%s is left out: the output head is tied to the embeddings and has no weight of its own", name)
        return
    what = "is missing" if missing else "is not packed"
    raise CheckpointError(f"tensor {name} belongs to {stem}.weight, which {what}; convert the model again")
