"""Picture files of many kinds, made from numbers alone, so that tests and the reference see the same bytes' content."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image


def pixels(width: int, height: int, seed: int = 0, channels: int = 3) -> np.ndarray:
    """Smooth waves with some noise, uint8 `[height, width, channels]`."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width].astype(np.float64)
    waves = [
        np.sin(x * rng.uniform(0.01, 0.6) + rng.uniform(0, 6)) + np.cos(y * rng.uniform(0.01, 0.6))
        for _ in "x" * channels
    ]
    noise = rng.normal(0, 0.15, (height, width, channels))
    return np.clip((np.stack(waves, axis=-1) + noise + 2) * 64, 0, 255).astype(np.uint8)


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def png(width: int, height: int, seed: int = 0) -> bytes:
    return file_of(Image.fromarray(pixels(width, height, seed)))


SIZES = ((1, 1), (3, 5), (17, 200), (64, 64), (97, 61), (640, 37), (333, 257), (900, 1200))
"""Width and height of the pictures whose sizing is compared with the reference's."""


def variants() -> dict[str, Image.Image]:
    """Pictures in every mode that files come in, 93 × 71."""
    rgb = Image.fromarray(pixels(93, 71, 5))
    alpha = Image.fromarray(pixels(93, 71, 6)[:, :, 0])
    palette = rgb.quantize(32)
    clear = rgb.quantize(16)
    clear.info["transparency"] = 3
    rgba = rgb.copy()
    rgba.putalpha(alpha)
    return {
        "rgb": rgb,
        "grey": rgb.convert("L"),
        "bilevel": rgb.convert("1"),
        "alpha": rgba,
        "grey_alpha": rgba.convert("LA"),
        "palette": palette,
        "clear_palette": clear,
    }
