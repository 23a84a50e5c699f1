"""What the harness reports."""

from __future__ import annotations

from collections.abc import Sequence


class MetalError(Exception):
    """A fault in a kernel: `kind` is one word (compile, race, out-of-bounds, divergent-barrier, ...)."""

    def __init__(self, kind: str, message: str, where: Sequence[str] = ()) -> None:
        self.kind = kind
        super().__init__(message + "".join(f"\n    at {place}" for place in where))
