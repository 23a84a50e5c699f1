"""What every family's images have in common: marks in the prompt, sizing, patches, a memory of what was cut already."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from arriero.chat.media.picture import read_picture
from arriero.errors import CheckpointError, InvalidRequest
from arriero.image import ImagePatches

if TYPE_CHECKING:
    from PIL import Image

Triple = tuple[float, float, float]

MAX_PREPARED = 512 << 20
"""Bytes of the pixels of one request's images after sizing."""


@dataclass(frozen=True, slots=True)
class Marks:
    """How an image is written in a prompt's text."""

    written: str
    """What chat templates write for one."""
    before: str
    placeholder: str
    after: str
    """What takes the place of `written`, with as many placeholders as the image has tokens."""
    bare: tuple[str, str] = ("", "")
    """What more stands around it where no template wrote anything."""


@dataclass(frozen=True, slots=True)
class Pixels:
    """How pixels become numbers, as `preprocessor_config.json` says it."""

    mean: Triple
    deviation: Triple
    filter: int
    """Of resizing, by Pillow's numbers: 2 bilinear, 3 bicubic."""

    @classmethod
    def read(cls, settings: Mapping[str, Any], *, mean: Triple, deviation: Triple, filter: int) -> Self:  # noqa: A002
        """With the family's defaults; CheckpointError for what we don't honour."""
        if settings.get("do_resize") is False or settings.get("do_rescale") is False:
            raise _unlike("do_resize and do_rescale", "true", settings)
        factor = settings.get("rescale_factor", 1 / 255)
        if not isinstance(factor, int | float) or abs(factor * 255 - 1) > 1e-6:
            raise _unlike("rescale_factor", "1/255", settings)
        chosen = settings.get("resample", filter)
        if chosen not in (2, 3):
            raise _unlike("resample", "2 (bilinear) or 3 (bicubic)", settings)
        if settings.get("do_normalize") is False:
            return cls((0.0, 0.0, 0.0), (1.0, 1.0, 1.0), chosen)
        return cls(_triple(settings, "image_mean", mean), _triple(settings, "image_std", deviation), chosen)


class Media(Protocol):
    """One model's way with images."""

    marks: Marks

    def cut(self, picture: Image.Image) -> ImagePatches:
        """An RGB picture, sized and cut into patches; InvalidRequest for a shape that the model can't take."""
        ...


class Cutter:
    """Reads and cuts the images of one request, each once however often the prompt is written."""

    def __init__(self, media: Media) -> None:
        self._media = media
        self._done: dict[bytes, ImagePatches] = {}
        self._bytes = 0

    def __call__(self, data: bytes) -> ImagePatches:
        """The patches of a picture's file; InvalidRequest or UnsupportedFeature say what is wrong with it."""
        if data not in self._done:
            patches = self._media.cut(read_picture(data))
            self._bytes += len(patches.pixels)
            if self._bytes > MAX_PREPARED:
                raise InvalidRequest(
                    f"the images of this request take more than {MAX_PREPARED} bytes of pixels: "
                    "send fewer or smaller ones"
                )
            self._done[data] = patches
        return self._done[data]


def resized(picture: Image.Image, width: int, height: int, how: Pixels) -> np.ndarray:
    """8-bit pixels `[height, width, 3]`."""
    if picture.size != (width, height):
        picture = picture.resize((width, height), resample=how.filter)
    return np.asarray(picture)


def whole_number(settings: Mapping[str, Any], name: str, default: int) -> int:
    """A positive whole number of a configuration."""
    value = settings.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"`{name}` of the image settings should be a positive whole number, found {value!r}")
    return value


def _triple(settings: Mapping[str, Any], name: str, default: Triple) -> Triple:
    values = settings.get(name, default)
    numbers = isinstance(values, list | tuple) and all(isinstance(v, int | float) for v in values)
    if not numbers or len(values) != 3 or (name == "image_std" and 0 in values):
        raise _unlike(name, "three numbers", settings)
    first, second, third = (float(value) for value in values)
    return first, second, third


def _unlike(name: str, expected: str, settings: Mapping[str, Any]) -> CheckpointError:
    found = {part: settings.get(part) for part in name.split(" and ")}
    return CheckpointError(f"preprocessor_config.json: {name} should be {expected}, found {found}")
