"""Safetensors files: validated headers, mapped views, and a writer for small files.

Layout: u64 little-endian header length, a JSON object, then the tensors' bytes without holes
(https://huggingface.co/docs/safetensors). Everything is checked before the first tensor is used.
"""

from __future__ import annotations

import copy
import json
import math
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import ml_dtypes
import numpy as np

from arriero.errors import CheckpointError
from arriero.formats.mapped import REPAIR, SHOWN, map_file

MAX_HEADER = 100_000_000
MAX_DIMENSIONS = 32

BITS: dict[str, int] = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}

NUMPY: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E4M3": np.dtype(np.uint8),
    "F8_E5M2": np.dtype(np.uint8),
    "F8_E8M0": np.dtype(np.uint8),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "F32": np.dtype("<f4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F64": np.dtype("<f8"),
    "C64": np.dtype("<c8"),
}
"""Element types of views; 8-bit floats come as their codes, as MLX loads them."""


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """One tensor of a file: where its bytes are (absolute offsets) and what they mean."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


class SafetensorsFile:
    """A mapped file whose header has been validated."""

    def __init__(self, path: str | Path) -> None:
        """Open and validate; raises CheckpointError naming the file and, where there is one, the tensor."""
        self.path = Path(path)
        self._bytes = map_file(self.path)
        header, data_start = _header(self.path, self._bytes)
        self.metadata = _metadata(self.path, header.pop("__metadata__", {}))
        self.tensors = _spans(self.path, header, data_start, len(self._bytes))

    def renamed(self, names: Mapping[str, str]) -> Self:
        """The same file with some of its tensors under other names."""
        found = copy.copy(self)
        spans = (replace(span, name=names.get(name, name)) for name, span in self.tensors.items())
        found.tensors = {span.name: span for span in spans}
        return found

    def view(self, name: str) -> np.ndarray:
        """A read-only view of a tensor's bytes as its NumPy type (see `NUMPY`); KeyError for an unknown name."""
        span = self.tensors[name]
        if span.dtype not in NUMPY:
            raise CheckpointError(f"{self.path}: tensor {name} is stored as {span.dtype}, which cannot be viewed")
        return self._bytes[span.start : span.end].view(NUMPY[span.dtype]).reshape(span.shape)

    def raw(self, name: str) -> np.ndarray:
        """A read-only view of a tensor's bytes, uint8 `[nbytes]`."""
        span = self.tensors[name]
        return self._bytes[span.start : span.end]


def write(path: str | Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> None:
    """Write a file with its header padded to 8 bytes; element types follow from the arrays' NumPy types.

    8-bit float codes are written as U8. Raises ValueError for a type that safetensors does not have.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    names = {dtype: name for name, dtype in reversed(NUMPY.items())}
    names[np.dtype(np.uint8)] = "U8"
    names[np.dtype(ml_dtypes.float8_e4m3fn)] = "F8_E4M3"
    names[np.dtype(ml_dtypes.float8_e5m2)] = "F8_E5M2"
    offset = 0
    for name, array in tensors.items():
        if array.dtype not in names:
            raise ValueError(f"tensor {name}: safetensors has no type for {array.dtype}")
        header[name] = {
            "dtype": names[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with Path(path).open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for array in tensors.values():
            file.write(np.ascontiguousarray(array).tobytes())


def _header(path: Path, data: np.ndarray) -> tuple[dict[str, Any], int]:
    if len(data) < 10:
        raise CheckpointError(f"{path}: {len(data)} bytes are too few for a safetensors file; {REPAIR}")
    if data[:23].tobytes() == b"version https://git-lfs":
        raise CheckpointError(f"{path}: is a Git LFS pointer, not the tensors; fetch the file with git lfs pull")
    length = int(data[:8].view("<u8")[0])
    if length > MAX_HEADER:
        raise CheckpointError(f"{path}: a header of {length} bytes is over the limit of {MAX_HEADER}: not safetensors?")
    if 8 + length > len(data):
        raise CheckpointError(f"{path}: a header of {length} bytes does not fit a file of {len(data)}; {REPAIR}")
    text = data[8 : 8 + length].tobytes()
    if not text.startswith(b"{"):
        raise CheckpointError(f"{path}: the header does not start with '{{': not a safetensors file")
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not valid JSON ({error}); {REPAIR}") from error
    return header, 8 + length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"duplicate name {name!r:.{SHOWN}}")
    return found


def _metadata(path: Path, metadata: Any) -> dict[str, str]:
    if metadata is None:  # MLX writes null for "no metadata"
        return {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ must map strings to strings")
    return metadata


def _spans(path: Path, header: dict[str, Any], data_start: int, size: int) -> dict[str, TensorSpan]:
    spans = {name: _span(path, name, entry, data_start, size) for name, entry in header.items()}
    position = data_start
    for span in sorted(spans.values(), key=lambda s: (s.start, s.end)):
        if span.start != position:
            what = "overlaps its neighbour" if span.start < position else "leaves a hole before it"
            raise CheckpointError(
                f"{path}: tensor {span.name:.{SHOWN}} {what} (starts at {span.start}, expected {position})"
            )
        position = span.end
    if position != size:
        raise CheckpointError(f"{path}: {size - position} bytes after the last tensor belong to none; {REPAIR}")
    return spans


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _span(path: Path, name: str, entry: Any, data_start: int, size: int) -> TensorSpan:
    where = f"{path}: tensor {name:.{SHOWN}}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise CheckpointError(f"{where} lacks one of dtype, shape, data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise CheckpointError(f"{where} has the unknown element type {dtype!r:.40}; known are {', '.join(BITS)}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(map(_is_count, shape)):
        raise CheckpointError(f"{where} has an invalid shape {shape!r:.80}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise CheckpointError(f"{where} has invalid offsets {offsets!r:.80}")
    start, end = offsets
    bits = math.prod(shape) * BITS[dtype]
    if start > end or bits != (end - start) * 8:
        raise CheckpointError(
            f"{where}: {dtype} of shape {shape} takes {bits // 8} bytes, "
            f"its offsets {offsets} hold {end - start}; {REPAIR}"
        )
    if data_start + end > size:
        raise CheckpointError(
            f"{where} ends at byte {data_start + end} of a file of {size}: the file is incomplete; {REPAIR}"
        )
    return TensorSpan(name, dtype, tuple(shape), data_start + start, data_start + end)
