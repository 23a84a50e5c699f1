"""Which blobs a safetensors model becomes: one for each tensor, a packed one with its scales and zero points.

Every decision is made here; the writer copies bytes, or has them made. Weights keep the precision that they have unless
another is asked for (`recode.py`).
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from arriero.create.gptq import take_gptq
from arriero.create.inventory import Inventory
from arriero.create.layout import layout_of
from arriero.create.made import Made, Piece
from arriero.create.precisions import PACKED
from arriero.create.recode import Recoding
from arriero.errors import CheckpointError, UnsupportedFeature
from arriero.formats.blockfp8 import scale_fits
from arriero.formats.safetensors import BITS
from arriero.model.companions import Bundle, Part, bundle
from arriero.model.packing import configured, float_layout
from arriero.model.quantization import Quantization

log = logging.getLogger(__name__)

_FLOATS = ("F32", "BF16", "F16")
_EXPERT = re.compile(r"(.+\.experts)\.\d+\.\w+\.weight\w*$")


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
    made: Made | None = None
    """What makes it, where it is not copied; it has no parts then."""
    source: str = ""
    """What a tensor that is made was stored as."""
    members: tuple[BlobPlan, ...] = ()
    """The tensors of a layer that holds several: the experts of one layer of a model. It has nothing else then."""

    @property
    def tensors(self) -> tuple[BlobPlan, ...]:
        """The members, or the one tensor."""
        return self.members or (self,)

    @property
    def nbytes(self) -> int:
        """Bytes that are read, without the header."""
        if self.members:
            return sum(member.nbytes for member in self.members)
        return self.made.source_bytes if self.made is not None else self.stored_bytes

    @property
    def pieces(self) -> dict[str, Piece]:
        """What its file holds, in the order of the bytes."""
        if self.members:
            return {key: piece for member in self.members for key, piece in member.pieces.items()}
        if self.made is not None:
            return self.made.pieces
        return {key: Piece(part.span.dtype, part.span.shape) for key, part in self.parts.items()}

    @property
    def stored_bytes(self) -> int:
        """Bytes that are written, without the header."""
        return sum(piece.nbytes for piece in self.pieces.values())

    @property
    def stored_as(self) -> str:
        """The kind, else the element type."""
        return self.kind or self.pieces[self.name].dtype


@dataclass(frozen=True)
class Plan:
    """All tensor layers, in the order of their names."""

    blobs: list[BlobPlan]
    kept: Mapping[str, Path] = field(default_factory=dict)
    """Layers of tensors that are in the store already, by name."""
    gguf: tuple[Path, ...] = ()
    """The files of a GGUF model that the layers are beside."""

    @property
    def parameters(self) -> int:
        """Numbers in all logical tensors."""
        return sum(blob.elements for blob in self.blobs)

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        return sum(blob.nbytes for blob in self.blobs)

    @property
    def made(self) -> int:
        """How many tensors become something else, in fact or in name."""
        tensors = [tensor for blob in self.blobs for tensor in blob.tensors]
        return sum(tensor.made is not None and tensor.source != tensor.stored_as for tensor in tensors)

    @property
    def file_type(self) -> str:
        """Quantisation as people call it: the narrowest packed kind, else the commonest element type."""
        packed = [blob.kind for blob in self.blobs if blob.kind]
        if packed:
            return min(packed, key=lambda kind: int("".join(filter(str.isdigit, kind))))
        counts: Counter[str] = Counter()
        for blob in self.blobs:
            for piece in blob.pieces.values():
                if piece.dtype in _FLOATS:
                    counts[piece.dtype] += piece.nbytes * 8 // BITS[piece.dtype]
        return counts.most_common(1)[0][0] if counts else ""


def make_plan(inventory: Inventory, recoding: Recoding | None = None) -> Plan:
    """Plan the layers, in another precision if `recoding` asks for one.

    Raises CheckpointError, and UnsupportedFeature for a quantisation that isn't known.
    """
    foreign, tensors = take_gptq(inventory.tensors, inventory.config)
    blobs = [
        BlobPlan(m.name, {}, {"quant_type": m.kind, "group_size": str(m.group_size)}, m.elements, m.kind, m, m.source)
        for m in foreign
    ]
    hints = configured(inventory.config)
    multiplied: set[str] = set()
    for found in bundle(tensors):
        if recoding is not None and (changed := recoding.of(found, inventory.tensors, hints)) is not None:
            metadata = _labels(changed.kind) | _origin(found.parts)
            kind = changed.kind if changed.kind in PACKED else ""
            multiplied.add(changed.factor)
            elements = math.prod(changed.made.pieces[found.name].shape) * changed.packing
            blobs.append(BlobPlan(found.name, {}, metadata, elements, kind, changed.made, changed.source))
            continue
        stem, _, last = found.name.rpartition(".")
        dtype = found.data.span.dtype
        # Integers that nobody scales would be taken for the weights themselves.
        codes = found.scales is None and dtype not in _FLOATS and (last == "weight" or dtype.startswith("F"))
        if found.fp8_scale is not None:
            blobs.extend(_fp8(found))
            continue
        if found.refused is not None or (codes and not _has_table_factor(found, inventory)):
            raise UnsupportedFeature(
                f"tensor {found.name} is stored as {dtype}, a quantisation that is not imported yet; "
                "use the BF16 weights, an FP8, NVFP4 or MLX conversion of the model, or a GGUF file"
            )
        if found.scales is None and last in ("scales", "biases"):
            _check_orphan(found.name, stem, inventory)
        elif found.scales is None:
            elements = math.prod(found.data.span.shape)
            blobs.append(BlobPlan(found.name, {found.name: found.data}, _origin([found.data]), elements))
        elif found.scales.span.name.endswith((".scales", f"{found.name}.scale")):
            blobs.append(_packed(found, hints))
        else:
            blobs.extend(_kept_apart(found))
    if not blobs:
        raise CheckpointError("the model has scales and zero points but no weights; convert it again")
    return Plan(_joined(sorted((blob for blob in blobs if blob.name not in multiplied), key=lambda blob: blob.name)))


def _joined(blobs: list[BlobPlan]) -> list[BlobPlan]:
    """Experts that are stored one by one in a layer for all of a module's, or a model would have a hundred thousand."""
    found: dict[str, list[BlobPlan]] = {}
    for blob in blobs:
        expert = _EXPERT.match(blob.name)
        found.setdefault(blob.name if expert is None else expert[1], []).append(blob)
    return [_layer(name, members) for name, members in sorted(found.items())]


def _layer(name: str, members: list[BlobPlan]) -> BlobPlan:
    if len(members) == 1 and members[0].name == name:
        return members[0]
    metadata = _particular(member.metadata for member in members)
    for member in members:
        metadata |= {f"{member.name}.{key}": value for key, value in member.metadata.items() if key != "format"}
    packed = [member.kind for member in members if member.kind]
    kind = min(packed, key=lambda kind: int("".join(filter(str.isdigit, kind))), default="")
    return BlobPlan(name, {}, metadata, sum(m.elements for m in members), kind, members=tuple(members))


def _labels(kind: str) -> dict[str, str]:
    """What a packed blob's file says about itself."""
    how = PACKED.get(kind)
    return {"quant_type": how.name, "group_size": str(how.group_size)} if how is not None else {}


def _packed(found: Bundle, hints: Mapping[str, Quantization]) -> BlobPlan:
    """A tensor of an MLX conversion, whose `X.scales` and `X.biases` become `X.weight.scale` and `X.weight.bias`, or
    one of another stored model, whose companions are called that already.
    """
    assert found.scales is not None
    if found.global_kind == "largest" and found.global_scale is not None:
        raise UnsupportedFeature(f"tensor {found.name} has a global scale in MLX's form, which is not imported yet")
    how = layout_of(found, hints)
    if found.biases is not None and how.mode != "affine":
        raise CheckpointError(f"tensor {found.name} has 8-bit scales and zero points: none of nvfp4, mxfp4, mxfp8")
    parts = {found.name: found.data, f"{found.name}.scale": found.scales}
    if found.biases is not None:
        parts[f"{found.name}.bias"] = found.biases
    if found.global_scale is not None:
        parts[f"{found.name}.global_scale"] = found.global_scale
    metadata = {"quant_type": how.name, "group_size": str(how.group_size)} | _origin(parts.values())
    return BlobPlan(found.name, parts, metadata, math.prod(found.data.span.shape) * 32 // how.bits, how.name)


def _kept_apart(found: Bundle) -> list[BlobPlan]:
    """A tensor of a producer whose spelling the loader reads as it is: every part a layer under its own name."""
    assert found.scales is not None
    words = found.data.span.nbytes // 4
    how = float_layout(f"tensor {found.name}", words, math.prod(found.scales.span.shape))
    blobs = []
    for part in found.parts:
        first = part is found.data
        elements = words * 32 // how.bits if first else 0
        blobs.append(BlobPlan(part.span.name, {part.span.name: part}, {}, elements, how.name if first else ""))
    return blobs


def _fp8(found: Bundle) -> list[BlobPlan]:
    """Codes with float scales by block, row or tensor, which a runner decodes: two layers under their own names."""
    assert found.fp8_scale is not None
    codes, scales = found.data.span, found.fp8_scale.span
    if not scale_fits(codes.shape, scales.shape):
        raise CheckpointError(
            f"tensor {found.name} of shape {list(codes.shape)} has FP8 scales of shape {list(scales.shape)}, expected "
            "one, one per row, or one per block of 128 × 128; convert the model again"
        )
    return [
        BlobPlan(codes.name, {codes.name: found.data}, {}, math.prod(codes.shape), "fp8"),
        BlobPlan(scales.name, {scales.name: found.fp8_scale}, {}, 0),
    ]


def _has_table_factor(found: Bundle, inventory: Inventory) -> bool:
    """Whether these codes are a shard of a table (`T.shard_0.weight`) that has one factor for all, `T.weight_scale`."""
    table = re.fullmatch(r"(.+)\.shard_\d+\.weight", found.name)
    return table is not None and found.data.span.dtype == "F8_E4M3" and f"{table[1]}.weight_scale" in inventory.tensors


def _origin(parts: Iterable[Part]) -> dict[str, str]:
    """MLX conversions say so in their files; some tensors are laid out otherwise there, so the blobs say it too. So do
    layers that were made of a GGUF file.
    """
    return _particular(part.file.metadata for part in parts)


def _particular(metadata: Iterable[Mapping[str, str]]) -> dict[str, str]:
    return next(({"format": said["format"]} for said in metadata if said.get("format") in ("mlx", "gguf")), {})


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
