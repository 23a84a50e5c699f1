"""What a model file is, by its first bytes: names lie, and a Git LFS pointer is a text file of any name."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from arriero.errors import InvalidRequest

Kind = Literal["gguf", "safetensors", "pytorch", "lfs", "json", "empty", "unknown"]

_PICKLE = b"\x80"
_ZIP = b"PK\x03\x04"


def sniff(path: Path) -> Kind:
    """The kind of a file; raises InvalidRequest when it can't be read."""
    try:
        with path.open("rb") as file:
            head = file.read(64)
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}") from None
    if not head:
        return "empty"
    if head.startswith(b"GGUF"):
        return "gguf"
    if head.startswith(b"version https://git-lfs"):
        return "lfs"
    # Before pickles: the length of a header may begin with the byte that they begin with.
    if len(head) > 9 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 30:
        return "safetensors"
    if head.startswith((_PICKLE, _ZIP)):
        return "pytorch"
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith((b"{", b"[")):
        return "json"
    return "unknown"


def refuse(name: str, kind: Kind) -> InvalidRequest:
    """The error for a file that is no model, saying what it is and what to do."""
    said = {
        "lfs": "is a Git LFS pointer, not the file itself; fetch it with git lfs pull",
        "pytorch": "holds PyTorch weights, which arriero does not import; convert them to safetensors",
        "empty": "is empty; copy or download it again",
        "json": "is a JSON file, not weights",
    }.get(kind, "is neither a GGUF file nor safetensors")
    return InvalidRequest(f"{name} {said}")
