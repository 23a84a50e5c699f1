"""GGUF files: a fast reader that trusts nothing, and mapped views of the tensors.

Counts, lengths and offsets are checked against the file's size before anything is allocated; strings of large arrays
are decoded only when somebody asks. Source: the GGUF specification, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import itertools
import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from arriero.errors import CheckpointError
from arriero.formats.gguf_types import BY_ID, BlockType
from arriero.formats.mapped import REPAIR, SHOWN, map_file

MAX_ELEMENTS = 1 << 24
"""Elements of arrays that one header may hold; the largest real vocabularies have some hundred thousand."""
MAX_ENTRIES = 1 << 20
MAX_ALIGNMENT = 1 << 20
MAX_KEY = 65535

SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("<u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
BOOL, STRING, ARRAY = 7, 8, 9

PLAIN: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F64": np.dtype("<f8"),
    "I8": np.dtype("<i1"),
    "I16": np.dtype("<i2"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}

_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor of a file; `shape` is row-major (`[out, in]`), the reverse of the file's order."""

    name: str
    type: BlockType
    shape: tuple[int, ...]
    start: int
    end: int
    file: GGUFFile

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    def raw(self) -> np.ndarray:
        """A read-only view of the bytes: uint8 `[..., out, bytes of a row]`."""
        row = self.shape[-1] // self.type.block * self.type.nbytes
        return self.file.data[self.start : self.end].reshape(*self.shape[:-1], row)

    def dense(self) -> np.ndarray:
        """A read-only view of a plain type as its NumPy type; ValueError for a block type."""
        if not self.type.plain:
            raise ValueError(f"tensor {self.name} is packed as {self.type.name}")
        return self.file.data[self.start : self.end].view(PLAIN[self.type.name]).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class _Value:
    kind: int
    start: int
    count: int | None = None
    """Elements of an array; None for a single value."""


class Metadata(Mapping[str, Any]):
    """The key-value pairs as plain Python values, decoded when asked for (and kept)."""

    def __init__(self, data: np.ndarray, values: dict[str, _Value], path: Path) -> None:
        self._data = data
        self._values = values
        self._path = path
        self._decoded: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key not in self._decoded:
            value = self._values[key]
            reader = _Reader(self._path, self._data, value.start)
            self._decoded[key] = reader.decode(value.kind, value.count)
        return self._decoded[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def array_length(self, key: str) -> int | None:
        """Elements of an array without decoding it; None for a single value."""
        return self._values[key].count


class GGUFFile:
    """A mapped file whose header has been validated."""

    def __init__(self, path: str | Path) -> None:
        """Open and validate; raises CheckpointError naming the file and the key or tensor."""
        self.path = Path(path)
        self.data = map_file(self.path)
        reader = _Reader(self.path, self.data, 0)
        self.version, tensor_count, key_count = _preamble(reader)
        self.metadata = Metadata(self.data, _values(reader, key_count), self.path)
        self._keys = (24, reader.position)
        self.alignment = self._alignment()
        entries = _entries(reader, tensor_count)
        self.tensors = self._tensors(entries, reader.position)

    def without_tensors(self) -> bytes:
        """A file of the same keys and no tensor."""
        start, end = self._keys
        head = struct.pack("<4sIQQ", b"GGUF", self.version, 0, len(self.metadata))
        return head + self.data[start:end].tobytes()

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise CheckpointError(f"{self.path}: general.alignment {alignment!r:.40} is not a power of two")
        return alignment

    def _tensors(self, entries: list[_Entry], header_end: int) -> dict[str, GGUFTensor]:
        base = -(-header_end // self.alignment) * self.alignment
        tensors: dict[str, GGUFTensor] = {}
        for entry in entries:
            where = f"{self.path}: tensor {entry.name:.{SHOWN}}"
            if entry.name in tensors:
                raise CheckpointError(f"{where} is listed twice")
            if entry.type not in BY_ID:
                known = ", ".join(t.name for t in BY_ID.values())
                raise CheckpointError(f"{where} has the unknown type id {entry.type}; known types are {known}")
            block_type = BY_ID[entry.type]
            shape = tuple(reversed(entry.dimensions)) or (1,)
            if shape[-1] % block_type.block:
                raise CheckpointError(
                    f"{where} has rows of {shape[-1]} values, not a multiple of the {block_type.block} that "
                    f"{block_type.name} packs together"
                )
            nbytes = math.prod(shape) // block_type.block * block_type.nbytes
            if entry.offset % self.alignment:
                raise CheckpointError(f"{where} starts at {entry.offset}, not aligned to {self.alignment}")
            start = base + entry.offset
            if start + nbytes > len(self.data):
                raise CheckpointError(
                    f"{where} ends at byte {start + nbytes} of a file of {len(self.data)}: "
                    f"the file is incomplete; {REPAIR}"
                )
            tensors[entry.name] = GGUFTensor(entry.name, block_type, shape, start, start + nbytes, self)
        ordered = sorted(tensors.values(), key=lambda t: (t.start, t.end))
        for before, after in itertools.pairwise(ordered):
            if after.start < before.end:
                raise CheckpointError(f"{self.path}: tensors {before.name:.{SHOWN}} and {after.name:.{SHOWN}} overlap")
        return tensors


def open_shards(paths: Sequence[str | Path]) -> list[GGUFFile]:
    """Open a model of one or several files; the first holds the metadata.

    Raises CheckpointError when shards are missing, out of order or share a tensor.
    """
    if not paths:
        raise CheckpointError("a GGUF model needs at least one file, none was given")
    files = [GGUFFile(path) for path in paths]
    expected = files[0].metadata.get("split.count", 1)
    if isinstance(expected, int) and expected > 1 and expected != len(files):
        raise CheckpointError(f"{files[0].path}: the model is split over {expected} files, {len(files)} were given")
    seen: set[str] = set()
    for index, file in enumerate(files):
        number = file.metadata.get("split.no", index)
        if number != index:
            raise CheckpointError(f"{file.path}: is part {number!r:.20} of its model, given as part {index}")
        twice = seen & file.tensors.keys()
        if twice:
            raise CheckpointError(f"{file.path}: tensor {sorted(twice)[0]:.{SHOWN}} is in an earlier part too")
        seen |= file.tensors.keys()
    return files


def shard_paths(path: str | Path) -> list[Path]:
    """All parts of a model from the path of any one (`NAME-00001-of-00003.gguf`), or the path itself."""
    path = Path(path)
    match = _SHARD.search(path.name)
    if match is None:
        return [path]
    count = int(match[2])
    parts = [path.with_name(f"{path.name[: match.start()]}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    missing = [part.name for part in parts if not part.exists()]
    if not parts or missing:
        raise CheckpointError(f"{path}: parts of the model are missing: {', '.join(missing[:4])}")
    return parts


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    dimensions: tuple[int, ...]
    type: int
    offset: int


class _Reader:
    """A cursor that never passes the file's end; walks values without decoding them."""

    def __init__(self, path: Path, data: np.ndarray, position: int) -> None:
        self.path = path
        self.data = memoryview(data.data)
        self.size = len(data)
        self.position = position
        self.elements = 0

    def fail(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what} at byte {self.position}; the file is damaged: {REPAIR}")

    def u32(self) -> int:
        return int(self._unpack("<I", 4))

    def u64(self) -> int:
        return int(self._unpack("<Q", 8))

    def _unpack(self, code: str, size: int) -> Any:
        if self.position + size > self.size:
            raise self.fail("the header ends early")
        (value,) = struct.unpack_from(code, self.data, self.position)
        self.position += size
        return value

    def string(self, limit: int | None = None) -> str:
        length = self.u64()
        if length > self.size - self.position or (limit is not None and length > limit):
            raise self.fail(f"a string of {length} bytes")
        text = bytes(self.data[self.position : self.position + length])
        self.position += length
        return text.decode("utf-8", "replace")

    def value(self, key: str) -> _Value:
        """Step over a value, remembering where it is."""
        kind = self.u32()
        if kind != ARRAY:
            value = _Value(kind, self.position)
            self._skip(kind, 1, key)
            return value
        element, count = self.u32(), self.u64()
        value = _Value(element, self.position, count)
        self._skip(element, count, key)
        return value

    def _skip(self, kind: int, count: int, key: str, depth: int = 0) -> None:
        if kind in SCALARS:
            self.elements += count
            if count * SCALARS[kind].itemsize > self.size - self.position or self.elements > MAX_ELEMENTS:
                raise self.fail(f"{key:.{SHOWN}}: {count} values")
            self.position += count * SCALARS[kind].itemsize
            return
        if kind not in (STRING, ARRAY) or depth > 3:
            raise self.fail(f"{key:.{SHOWN}}: the unknown value type {kind}")
        self.elements += count
        if count * 8 > self.size - self.position or self.elements > MAX_ELEMENTS:
            raise self.fail(f"{key:.{SHOWN}}: {count} elements")
        if kind == ARRAY:
            for _ in range(count):
                self._skip(self.u32(), self.u64(), key, depth + 1)
            return
        position, size, data, unpack = self.position, self.size, self.data, struct.Struct("<Q").unpack_from
        for _ in range(count):
            if position + 8 > size:
                raise self.fail(f"{key:.{SHOWN}}: the header ends early")
            position += 8 + unpack(data, position)[0]
        if position > size:
            raise self.fail(f"{key:.{SHOWN}}: a string passes the end of the file")
        self.position = position

    def decode(self, kind: int, count: int | None) -> Any:
        if count is None:
            return self.string() if kind == STRING else self._numbers(kind, 1)[0]
        if kind == STRING:
            return [self.string() for _ in range(count)]
        if kind == ARRAY:
            return [self.decode(self.u32(), self.u64()) for _ in range(count)]
        return self._numbers(kind, count)

    def _numbers(self, kind: int, count: int) -> list[Any]:
        dtype = SCALARS[kind]
        values = np.frombuffer(self.data, dtype, count, self.position)
        self.position += values.nbytes
        numbers: list[Any] = (values.astype(np.bool_) if kind == BOOL else values).tolist()
        return numbers


def _preamble(reader: _Reader) -> tuple[int, int, int]:
    if reader.size < 24:
        raise CheckpointError(f"{reader.path}: {reader.size} bytes are too few for a GGUF file; {REPAIR}")
    magic = bytes(reader.data[:4])
    if magic != b"GGUF":
        what = "is a Git LFS pointer" if bytes(reader.data[:11]) == b"version htt" else f"starts with {magic!r}"
        raise CheckpointError(f"{reader.path}: {what}, expected a GGUF file")
    reader.position = 4
    version = reader.u32()
    if version not in (2, 3):
        if version and version & 0xFFFF == 0:
            raise CheckpointError(f"{reader.path}: is a big-endian GGUF file; convert it to little-endian")
        raise CheckpointError(f"{reader.path}: GGUF version {version} is not supported (2 and 3 are); convert it anew")
    tensors, keys = reader.u64(), reader.u64()
    room = reader.size - reader.position
    for count, what, least in ((tensors, "tensors", 24), (keys, "keys", 13)):
        if count > MAX_ENTRIES or count * least > room:
            raise reader.fail(f"a count of {count} {what}")
    return version, tensors, keys


def _values(reader: _Reader, count: int) -> dict[str, _Value]:
    values: dict[str, _Value] = {}
    for _ in range(count):
        key = reader.string(MAX_KEY)
        if key in values:
            raise CheckpointError(f"{reader.path}: the key {key:.{SHOWN}} is there twice")
        values[key] = reader.value(key)
    return values


def _entries(reader: _Reader, count: int) -> list[_Entry]:
    entries = []
    for _ in range(count):
        name = reader.string(MAX_KEY)
        rank = reader.u32()
        if rank > 4:
            raise reader.fail(f"tensor {name:.{SHOWN}} has {rank} dimensions (4 at most)")
        dimensions = tuple(reader.u64() for _ in range(rank))
        if any(d == 0 or d >= 1 << 48 for d in dimensions):
            raise reader.fail(f"tensor {name:.{SHOWN}} has the impossible shape {dimensions}")
        entries.append(_Entry(name, dimensions, reader.u32(), reader.u64()))
    return entries
