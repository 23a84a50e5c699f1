"""Images of Gemma 4: as large as a number of tokens allows, the picture's proportions kept.

Sizes as in the published preprocessing (`Gemma4ImageProcessor` of transformers).
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


class Gemma4Media:
    """Cuts pictures as the model's `image_processor` settings and `vision_config` say.

    A token stands for a square of `pool` × `pool` patches. A `unified` model has no tower and takes that whole square
    for one patch.
    """

    def __init__(
        self, marks: Marks, vision: Mapping[str, Any], settings: Mapping[str, Any], *, unified: bool = False
    ) -> None:
        self.marks = marks
        self.patch = whole_number(vision, "patch_size", 16)
        self.pool = whole_number(vision, "pooling_kernel_size", 3)
        self.most = whole_number(settings, "max_soft_tokens", 280)
        self.unified = unified
        # The model itself brings values from 0 to 1 to −1 to 1.
        settings = {"do_normalize": False} | dict(settings)
        self.how = Pixels.read(settings, mean=(0.0, 0.0, 0.0), deviation=(1.0, 1.0, 1.0), filter=3)

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Width and height that a picture is brought to: multiples of a token's square, at most `most` of these."""
        unit = self.patch * self.pool
        factor = math.sqrt(self.most * unit**2 / (width * height))
        across, down = (math.floor(factor * side / unit) for side in (width, height))
        if across == 0 and down == 0:
            raise InvalidRequest(f"an image of {width} × {height} pixels cannot be sized for this model")
        if down == 0:
            across, down = min(width // height, self.most), 1
        elif across == 0:
            across, down = 1, min(height // width, self.most)
        return across * unit, down * unit

    def cut(self, picture: Image.Image) -> ImagePatches:
        """Patches row by row, the values of each as `[p, p, channels]`."""
        width, height = self.size(*picture.size)
        pixels = resized(picture, width, height, self.how)
        p = self.patch * (self.pool if self.unified else 1)
        rows, columns = height // p, width // p
        blocks = pixels.reshape(rows, p, columns, p, 3).transpose(0, 2, 1, 3, 4)
        return ImagePatches.of(
            rows=rows,
            columns=columns,
            tokens=width * height // (self.patch * self.pool) ** 2,
            pixels=blocks.tobytes(),
            mean=self.how.mean,
            deviation=self.how.deviation,
        )
