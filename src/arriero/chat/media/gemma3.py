"""Images of Gemma 3: every picture becomes a square of one size (its proportions are lost, as in training)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from arriero.chat.media.media import Marks, Pixels, resized, whole_number
from arriero.errors import CheckpointError
from arriero.image import ImagePatches

if TYPE_CHECKING:
    from PIL import Image


class Gemma3Media:
    """Cuts pictures as `preprocessor_config.json` and the configuration say."""

    def __init__(self, marks: Marks, config: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        vision: Mapping[str, Any] = config["vision_config"]
        self.marks = marks
        self.side = whole_number(vision, "image_size", 224)
        self.patch = whole_number(vision, "patch_size", 16)
        self.tokens = whole_number(config, "mm_tokens_per_image", 256)
        if settings.get("do_pan_and_scan"):
            raise CheckpointError("preprocessor_config.json: do_pan_and_scan is not in this version")
        size = settings.get("size") or {"height": self.side, "width": self.side}
        if not isinstance(size, Mapping) or {size.get("height"), size.get("width")} != {self.side}:
            raise CheckpointError(
                f"preprocessor_config.json: size is {size}, but the tower takes squares of {self.side} pixels"
            )
        if self.side % self.patch or math.isqrt(self.tokens) ** 2 != self.tokens:
            raise CheckpointError(
                f"config.json: {self.side} pixels in patches of {self.patch} do not make {self.tokens} tokens"
            )
        half = (0.5, 0.5, 0.5)
        self.how = Pixels.read(settings, mean=half, deviation=half, filter=2)

    def cut(self, picture: Image.Image) -> ImagePatches:
        """Patches row by row, the values of each as `[channels, p, p]`."""
        pixels = resized(picture, self.side, self.side, self.how)
        p, n = self.patch, self.side // self.patch
        return ImagePatches.of(
            rows=n,
            columns=n,
            tokens=self.tokens,
            pixels=pixels.reshape(n, p, n, p, 3).transpose(0, 2, 4, 1, 3).tobytes(),
            mean=self.how.mean,
            deviation=self.how.deviation,
        )
