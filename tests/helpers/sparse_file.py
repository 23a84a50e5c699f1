"""A safetensors file whose bytes are zeros that take no room on the disk: large tables for tests of memory."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

WIDTHS = {"U8": 1, "F8_E4M3": 1, "BF16": 2, "F32": 4, "I64": 8}


def write_sparse(
    path: Path, shapes: Mapping[str, tuple[str, tuple[int, ...]]], values: Mapping[str, np.ndarray] | None = None
) -> int:
    """Write tensors of type and shape, zero except for the `values` given; returns the bytes of the tensors."""
    header: dict[str, dict[str, object]] = {}
    offset = 0
    for name, (kind, shape) in shapes.items():
        size = WIDTHS[kind] * math.prod(shape)
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, value in (values or {}).items():
            file.seek(8 + len(text) + header[name]["data_offsets"][0])  # type: ignore[index]
            file.write(np.ascontiguousarray(value).tobytes())
        file.truncate(8 + len(text) + offset)
    return offset
