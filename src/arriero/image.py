"""An image as it crosses process borders: cut into patches by the server process, encoded by a runner.

Refuses to know pictures' file formats (`chat/media` reads them) and MLX (`model/vision` encodes them).
"""

from __future__ import annotations

import hashlib
from typing import Self

import msgspec


class ImagePatches(msgspec.Struct, frozen=True, kw_only=True):
    """One image in the form that a family's tower takes."""

    rows: int
    columns: int
    """Patches down and across."""
    tokens: int
    """Placeholder tokens that stand for it in a prompt."""
    pixels: bytes
    """8-bit values `[rows · columns, values of a patch]`; the family says in which order."""
    mean: tuple[float, float, float]
    deviation: tuple[float, float, float]
    """By channel: a value v means `(v / 255 − mean) / deviation`."""
    identity: str
    """Hash of all the rest: images of one identity have the same features."""

    @classmethod
    def of(
        cls,
        *,
        rows: int,
        columns: int,
        tokens: int,
        pixels: bytes,
        mean: tuple[float, float, float],
        deviation: tuple[float, float, float],
    ) -> Self:
        """With its identity."""
        digest = hashlib.sha256(repr((rows, columns, tokens, mean, deviation)).encode())
        digest.update(pixels)
        return cls(
            rows=rows,
            columns=columns,
            tokens=tokens,
            pixels=pixels,
            mean=mean,
            deviation=deviation,
            identity=digest.hexdigest(),
        )


class PlacedImage(msgspec.Struct, frozen=True, kw_only=True):
    """An image in a prompt."""

    offset: int
    """Index of its first placeholder among the prompt's tokens."""
    patches: ImagePatches

    @property
    def end(self) -> int:
        """Index behind its last placeholder."""
        return self.offset + self.patches.tokens
