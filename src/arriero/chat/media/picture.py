"""The bytes of a picture → upright RGB pixels, within limits.

Transparent pixels lie on white, 16-bit greys keep their upper half, a camera's orientation is applied, and of an
animation the first frame counts. Refuses to know models.
"""

from __future__ import annotations

import io
import logging
from typing import TYPE_CHECKING

import numpy as np

from arriero.errors import InvalidRequest, UnsupportedFeature

if TYPE_CHECKING:
    from PIL import Image

log = logging.getLogger(__name__)

MAX_BYTES = 64 << 20
"""Of one picture's file."""
MAX_PIXELS = 1 << 26
"""Of one picture, 8192 × 8192: what a small file may ask memory for."""

KINDS = {"JPEG": "JPEG", "MPO": "JPEG", "PNG": "PNG", "WEBP": "WebP", "GIF": "GIF", "BMP": "BMP"}
"""Pillow's names of the formats that we let it read, and ours. MPO, as some cameras write it, is found inside JPEG."""

_SOUNDS = ((b"RIFF", b"WAVE", "WAV"), (b"ID3", b"", "MP3"), (b"\xff\xfb", b"", "MP3"), (b"OggS", b"", "Ogg"))
_WHITE = (255, 255, 255, 255)


def read_picture(data: bytes) -> Image.Image:
    """The picture in a file, mode `RGB`.

    InvalidRequest says what is wrong with the bytes: another kind, damage, too large. UnsupportedFeature says that
    Pillow is missing.
    """
    if not data:
        raise InvalidRequest("an image is empty: it has no bytes")
    if len(data) > MAX_BYTES:
        raise InvalidRequest(f"an image has {len(data)} bytes; at most {MAX_BYTES} are taken: make it smaller")
    for start, inside, name in _SOUNDS:
        if data.startswith(start) and inside in data[8:12]:
            raise UnsupportedFeature(f"one of the images is a {name} file; sound is not in this version")
    image = _opened(data)
    width, height = image.size
    if not 0 < width * height <= MAX_PIXELS:
        raise _too_large(width, height)
    # Not `n_frames`, which walks through all frames of a file to count them.
    if getattr(image, "is_animated", False) and image.format != "MPO":
        log.warning("an animated %s is taken as a still picture: its first frame", KINDS[str(image.format)])
    try:
        return _upright(image)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - damaged files raise anything
        raise InvalidRequest(f"an image cannot be read, its file is damaged or incomplete: {error}") from None


def _opened(data: bytes) -> Image.Image:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise UnsupportedFeature(
            "images need Pillow, which is not installed where the server runs: pip install 'arriero[vision]'"
        ) from None
    try:
        return Image.open(io.BytesIO(data), formats=[kind for kind in KINDS if kind != "MPO"])
    except UnidentifiedImageError:
        known = ", ".join(dict.fromkeys(KINDS.values()))
        raise InvalidRequest(
            f"an image is of no kind that is read here ({known}); its {len(data)} bytes begin with {data[:8]!r}"
        ) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InvalidRequest(f"an image is too large, at most {MAX_PIXELS} pixels are taken: {error}") from None
    except Exception as error:  # noqa: BLE001 - damaged files raise anything
        raise InvalidRequest(f"an image cannot be read, its file is damaged: {error}") from None


def _too_large(width: int, height: int) -> InvalidRequest:
    return InvalidRequest(
        f"an image has {width} × {height} pixels; at most {MAX_PIXELS} are taken, and at least one: make it smaller"
    )


def _upright(image: Image.Image) -> Image.Image:
    from PIL import Image, ImageOps

    image.load()
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        # Pillow would clip 16-bit greys at 255 instead of scaling them.
        values = np.clip(np.asarray(image).astype(np.int64), 0, 0xFFFF) >> 8
        image = Image.fromarray(values.astype(np.uint8))
    if "A" in image.getbands() or "a" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, _WHITE), image)
    return image.convert("RGB")
