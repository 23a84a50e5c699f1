"""Images of Qwen 3.5, 3.6, 3.8 and Flash Next: any grid within two bounds of area, the picture's proportions kept.

Sizes as in the published preprocessing (`Qwen2VLImageProcessor` of transformers).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from arriero.chat.media.media import Marks, Pixels, resized, whole_number
from arriero.errors import InvalidRequest
from arriero.image import ImagePatches

if TYPE_CHECKING:
    from PIL import Image

MIN_PIXELS, MAX_PIXELS = 1 << 16, 1 << 24
"""Where the model's files don't say them."""
MAX_RATIO = 200
"""Of the sides of a picture."""


class QwenMedia:
    """Cuts pictures as `preprocessor_config.json` and `vision_config` say."""

    def __init__(self, marks: Marks, vision: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        self.marks = marks
        self.patch = whole_number(vision, "patch_size", 16)
        self.merge = whole_number(vision, "spatial_merge_size", 2)
        size = settings.get("size")
        bounds = size if isinstance(size, Mapping) else {}
        self.least = whole_number(bounds, "shortest_edge", whole_number(settings, "min_pixels", MIN_PIXELS))
        self.most = whole_number(bounds, "longest_edge", whole_number(settings, "max_pixels", MAX_PIXELS))
        half = (0.5, 0.5, 0.5)
        self.how = Pixels.read(settings, mean=half, deviation=half, filter=3)

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Width and height that a picture is brought to: multiples of a block, within the bounds of area."""
        if max(width, height) > MAX_RATIO * min(width, height):
            raise InvalidRequest(
                f"an image of {width} × {height} pixels is too long and thin: one side may be at most {MAX_RATIO} "
                "times the other"
            )
        unit = self.patch * self.merge
        sides = width, height
        near = [round(side / unit) * unit for side in sides]
        if near[0] * near[1] > self.most:
            shrink = math.sqrt(width * height / self.most)
            near = [max(unit, math.floor(side / shrink / unit) * unit) for side in sides]
        elif near[0] * near[1] < self.least:
            grow = math.sqrt(self.least / (width * height))
            near = [math.ceil(side * grow / unit) * unit for side in sides]
        return near[0], near[1]

    def cut(self, picture: Image.Image) -> ImagePatches:
        """Patches block by block, the values of each as `[channels, p, p]`."""
        width, height = self.size(*picture.size)
        pixels = resized(picture, width, height, self.how)
        p, m = self.patch, self.merge
        rows, columns = height // p, width // p
        # [block row, row in it, pixel row, block column, column in it, pixel column, channel]
        blocks = pixels.reshape(rows // m, m, p, columns // m, m, p, 3)
        return ImagePatches.of(
            rows=rows,
            columns=columns,
            tokens=rows * columns // m**2,
            pixels=blocks.transpose(0, 3, 1, 4, 6, 2, 5).tobytes(),
            mean=self.how.mean,
            deviation=self.how.deviation,
        )
