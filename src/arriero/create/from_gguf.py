"""A GGUF model as tensor layers, in another precision or with an adapter merged.

The layers keep what is particular about such files (order of axes, gains with their 1) and say so, and the file's keys
go with them, so that the model runs as it did: what no precision changes gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from arriero.create.adapter import Adapted
from arriero.create.made import Made, Piece, Sink, Told
from arriero.create.numbers import Numbers, finite
from arriero.create.plan import BlobPlan, Plan
from arriero.create.policies import Tensor
from arriero.create.precisions import DENSE, PACKED, PLAIN, SOURCE
from arriero.create.quantize import BLOCK, Plain, Quantized
from arriero.create.recode import Recoding
from arriero.errors import CheckpointError
from arriero.formats.gguf import GGUFFile
from arriero.formats.gguf_blocks import decode
from arriero.formats.gguf_repack import repack
from arriero.model.gguf_orders import take_columns
from arriero.model.gguf_tensors import NamedTensor, named_tensors
from arriero.model.quantization import Quantization

_FORMAT = {"format": "gguf"}


def plan_gguf(files: Sequence[GGUFFile], config: Mapping[str, Any], recoding: Recoding) -> tuple[Plan, int]:
    """The layers, and how many tensors change; reads headers. Raises CheckpointError naming file and tensor."""
    blobs, changed = [], 0
    for found in named_tensors(files, config):
        made, kind = _made(found, recoding)
        changed += not made.lossless
        how = PACKED.get(kind) or (found.quantization if isinstance(made, Repacked) else None)
        labels = {} if how is None else {"quant_type": how.name, "group_size": str(how.group_size)}
        blobs.append(
            BlobPlan(
                found.name,
                {},
                labels | _FORMAT,
                math.prod(found.tensor.shape),
                "" if how is None else how.name,
                made,
                found.tensor.type.name,
            )
        )
    return Plan(sorted(blobs, key=lambda blob: blob.name)), changed


def _made(found: NamedTensor, recoding: Recoding) -> tuple[Made, str]:
    """How a tensor is written, and the precision that it gets where it changes."""
    shape, source, how = found.tensor.shape, found.tensor.type.name, found.quantization
    if len(shape) < 2:
        return Copied(found), SOURCE
    numbers: Numbers = BlockNumbers(found)
    kind = recoding.policy(Tensor(found.name, shape), recoding.asked) if recoding.asked else SOURCE
    delta = recoding.adapter.delta_of(found.name, shape) if recoding.adapter is not None else None
    if delta is not None:
        kind = kind or next((name for name, dtype in PLAIN.items() if dtype == source), "bf16")
        numbers = Adapted(numbers, delta)
    size = found.tensor.nbytes
    if kind in PLAIN and (delta is not None or source != DENSE.get(kind)):
        return Plain(numbers, PLAIN[kind], size), kind
    # A second rounding never adds precision.
    if kind in PACKED and (delta is not None or how is None or how.bits > PACKED[kind].bits):
        scales = source if source in ("F16", "BF16", "F32") else "BF16"
        return Quantized(numbers, kind, scales, size, recoding.search), kind
    return (Copied(found) if how is None else Repacked(found, how)), SOURCE


@dataclass(frozen=True)
class BlockNumbers:
    """A tensor of a GGUF file, in Hugging Face's order."""

    found: NamedTensor

    @property
    def name(self) -> str:
        """Hugging Face's."""
        return self.found.name

    @property
    def shape(self) -> tuple[int, ...]:
        """`[…, rows, columns]`."""
        return self.found.tensor.shape

    def read(self, start: int, stop: int) -> np.ndarray:
        """See `Numbers.read`."""
        tensor, order = self.found.tensor, self.found.order
        if tensor.type.plain:
            dense = tensor.dense()
            values = dense.reshape(-1, dense.shape[-1])[_rows(self.found, start, stop)].astype(np.float32)
        else:
            values = decode(tensor.type, _blocks(self.found, start, stop))
        if order.columns is not None:
            values = np.take(values, order.columns, axis=-1)
        scale = self.found.scale
        if scale is not None:
            values = values * (scale if scale.ndim == 0 else scale[start // self.shape[-2]])
        return finite(values, self.name)


@dataclass(frozen=True)
class Copied:
    """Plain numbers as they are, in Hugging Face's order."""

    found: NamedTensor
    lossless: bool = True

    @property
    def pieces(self) -> dict[str, Piece]:
        """The one tensor."""
        return {self.found.name: Piece(self.found.tensor.type.name, self.found.tensor.shape)}

    @property
    def source_bytes(self) -> int:
        """The tensor's."""
        return self.found.tensor.nbytes

    def write(self, sink: Sink, told: Told) -> float:
        """See `Made.write`."""
        dense, order = self.found.tensor.dense(), self.found.order
        rows = dense.reshape(-1, dense.shape[-1]) if dense.ndim > 1 else dense[:, None]
        step = max(1, BLOCK // rows.shape[-1])
        for start in range(0, len(rows), step):
            taken = rows[_rows(self.found, start, min(start + step, len(rows)))]
            if order.columns is not None:
                taken = np.take(taken, order.columns, axis=-1)
            sink(np.ascontiguousarray(taken).reshape(-1).view(np.uint8).data)
            told(taken.nbytes)
        return 0.0


@dataclass(frozen=True)
class Repacked:
    """Blocks in the layout of MLX's that a load of the file would give them, the scales of affine ones in float32."""

    found: NamedTensor
    how: Quantization
    lossless: bool = True
    """As far as a load of the file is."""

    @property
    def source_bytes(self) -> int:
        """The tensor's."""
        return self.found.tensor.nbytes

    @property
    def pieces(self) -> dict[str, Piece]:
        """The packed words and their companions."""
        name, (*lead, columns) = self.found.name, self.found.tensor.shape
        affine = self.how.mode == "affine"
        groups = Piece("F32" if affine else "U8", (*lead, columns // self.how.group_size))
        found = {name: Piece("U32", (*lead, columns * self.how.bits // 32)), f"{name}.scale": groups}
        if affine:
            found[f"{name}.bias"] = groups
        if self.found.scale is not None:
            found[f"{name}.global_scale"] = Piece("F32", self.found.scale.shape)
        return found

    def write(self, sink: Sink, told: Told) -> float:
        """See `Made.write`."""
        tensor, columns = self.found.tensor, self.found.order.columns
        count = math.prod(tensor.shape[:-1])
        step = max(1, 8 * BLOCK // tensor.shape[-1])
        scales, biases = [], []
        for start in range(0, count, step):
            raw = _blocks(self.found, start, min(start + step, count))
            try:
                packed = repack(tensor.type, raw)
                parts = [packed.data, packed.scales, *([] if packed.biases is None else [packed.biases])]
                if columns is not None:
                    # 32 numbers of any width fill whole words.
                    parts = [take_columns(part, columns, max(self.how.group_size, 32)) for part in parts]
            except CheckpointError as error:
                raise CheckpointError(f"tensor {tensor.name} of type {tensor.type.name}: {error}") from None
            sink(np.ascontiguousarray(parts[0]).reshape(-1).view(np.uint8).data)
            kind = np.float32 if self.how.mode == "affine" else np.uint8
            scales.append(parts[1].astype(kind))
            biases += [part.astype(np.float32) for part in parts[2:]]
            told(raw.nbytes)
        for array in (*scales, *biases):
            sink(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        if self.found.scale is not None:
            sink(self.found.scale.astype(np.float32).tobytes())
        return 0.0


def _blocks(found: NamedTensor, start: int, stop: int) -> np.ndarray:
    """The bytes of some rows, uint8 `[rows, bytes of a row]`."""
    raw = found.tensor.raw()
    taken: np.ndarray = raw.reshape(-1, raw.shape[-1])[_rows(found, start, stop)]
    return taken


def _rows(found: NamedTensor, start: int, stop: int) -> slice | np.ndarray:
    """Where rows are in the file; those of a stack are in their places but for the order within a matrix."""
    rows = found.order.rows
    if rows is None:
        return slice(start, stop)
    at = np.arange(start, stop)
    places: np.ndarray = at // len(rows) * len(rows) + rows[at % len(rows)]
    return places
