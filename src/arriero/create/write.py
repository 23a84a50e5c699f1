"""Tensor blobs: a safetensors file each, its header padded to eight bytes, its data copied byte for byte or made."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from arriero.create.made import Piece
from arriero.create.plan import BlobPlan
from arriero.store.blobs import CHUNK, BlobWriter, Ingested
from arriero.store.manifests import Layer
from arriero.store.store import Build

Progress = Callable[[dict[str, Any]], None]
"""Takes each status object (`{"status": …}`, for bytes with `total` and `completed`); raising stops the import."""


def add_layer(build: Build, data: bytes, media_type: str, progress: Progress, name: str = "") -> Layer:
    """Store a small layer."""
    stored = build.add(data)
    progress({"status": f"{'creating new' if stored.created else 'using existing'} layer {stored.digest}"})
    return Layer(media_type=media_type, digest=stored.digest, size=stored.size, name=name)


def write_tensor(
    build: Build, blob: BlobPlan, copied: Callable[[int], None], missed: Callable[[BlobPlan, float], None]
) -> Ingested:
    """Store one planned blob; `copied` is told the source's bytes as they go, `missed` the error of a tensor made."""

    def fill(writer: BlobWriter) -> None:
        writer.write(header_of(blob))
        for tensor in blob.tensors:
            if tensor.made is not None:
                missed(tensor, tensor.made.write(writer.write, copied))
            for part in tensor.parts.values():
                view = part.file.raw(part.span.name).data
                for at in range(0, len(view), CHUNK):
                    piece = view[at : at + CHUNK]
                    writer.write(piece)
                    copied(len(piece))

    return build.stream(fill)


def header_of(blob: BlobPlan) -> bytes:
    """Length and JSON header of a blob's file."""
    return header_of_pieces(blob.pieces, blob.metadata)


def header_of_pieces(pieces: Mapping[str, Piece], metadata: Mapping[str, str] | None = None) -> bytes:
    """The same for tensors by their names, in the order in which their bytes follow."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for key, piece in pieces.items():
        end = offset + piece.nbytes
        header[key] = {"dtype": piece.dtype, "shape": list(piece.shape), "data_offsets": [offset, end]}
        offset = end
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
