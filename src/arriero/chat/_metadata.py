"""GGUF metadata, until `formats/gguf.py` reads it."""

from __future__ import annotations

import mmap
import struct
from typing import Any

_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def read_metadata(path: str) -> dict[str, Any]:
    """All keys of a little-endian GGUF file."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        _, count = struct.unpack_from("<QQ", data, 8)
        offset = 24
        found: dict[str, Any] = {}
        for _ in range(count):
            key, offset = _value(data, 8, offset)
            (kind,) = struct.unpack_from("<I", data, offset)
            found[key], offset = _value(data, kind, offset + 4)
        return found


def _value(data: mmap.mmap, kind: int, offset: int) -> tuple[Any, int]:
    if kind == 8:
        (size,) = struct.unpack_from("<Q", data, offset)
        return data[offset + 8 : offset + 8 + size].decode(), offset + 8 + size
    if kind == 9:
        inner, count = struct.unpack_from("<IQ", data, offset)
        offset += 12
        if inner in _FORMATS:
            form = f"<{count}{_FORMATS[inner]}"
            return list(struct.unpack_from(form, data, offset)), offset + struct.calcsize(form)
        items = []
        for _ in range(count):
            item, offset = _value(data, inner, offset)
            items.append(item)
        return items, offset
    form = "<" + _FORMATS[kind]
    return struct.unpack_from(form, data, offset)[0], offset + struct.calcsize(form)
