"""The images of one row: each is encoded when the first of its tokens is forwarded, and forgotten after the last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from arriero.errors import InvalidRequest
from arriero.image import PlacedImage
from arriero.model.contract import Features, Vision


@dataclass(slots=True)
class _Pending:
    """An image whose tokens have not all been forwarded."""

    image: PlacedImage
    rows: mx.array | None = None
    """Its embeddings `[tokens, hidden]`, once they are wanted; computed with the forward that takes the first."""


class RowImages:
    """Gives every span of a prompt the rows of the images that it overlaps, and knows where all tokens stand."""

    def __init__(self, images: Sequence[PlacedImage], vision: Vision, length: int) -> None:
        """For a prompt of `length` tokens. InvalidRequest for images that overlap, leave the prompt or don't fit."""
        done = 0
        for image in images:
            if image.patches.tokens < 1 or image.offset < done or image.end > length:
                raise InvalidRequest(
                    f"an image stands at tokens {image.offset} to {image.end} of a prompt of {length}, "
                    f"where tokens from {done} on are free"
                )
            vision.check(image.patches)
            done = image.end
        if vision.atomic and done == length:
            raise InvalidRequest("the prompt ends with an image; a token must follow it, with which the reply begins")
        self._vision = vision
        self._pending = [_Pending(image) for image in images]
        self.layout = vision.layout(length, images)
        """Positions on several axes; None where they are the tokens' indices."""

    def features(self, start: int, length: int, at: int) -> list[Features]:
        """What replaces embeddings in a span of `length` tokens from `start` on, whose first has the packed index `at`.

        Spans are asked for in order: images that end before this one are forgotten.
        """
        self._pending = [pending for pending in self._pending if pending.image.end > start]
        found = []
        for pending in self._pending:
            image = pending.image
            low, high = max(image.offset, start), min(image.end, start + length)
            if low >= high:
                break
            if pending.rows is None:
                pending.rows = self._vision.encode(image.patches)
            rows = pending.rows[low - image.offset : high - image.offset]
            found.append(Features(at + low - start, rows))
        return found

    def whole(self, start: int, length: int) -> int:
        """The length of a chunk of about `length` tokens from `start` on that cuts no image which must not be cut.

        It ends before an image that begins inside it, or grows to the end of one that has begun.
        """
        if not self._vision.atomic or not length:
            return length
        end = start + length
        for pending in self._pending:
            if pending.image.offset < end < pending.image.end:
                return (pending.image.offset if pending.image.offset > start else pending.image.end) - start
        return length
