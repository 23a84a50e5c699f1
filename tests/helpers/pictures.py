"""Golden images and prompts, and driving a model with images by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from arriero.image import ImagePatches, PlacedImage
from arriero.model.contract import Batch, Features, Model, Span, vision_of
from arriero.runner.images import RowImages

GOLDENS = Path(__file__).parents[1] / "model" / "vision" / "goldens"
PROMPTS = ("first", "between", "last", "two")


@dataclass(frozen=True)
class Golden:
    """A prompt with images, the reference's logits for each token, and those of three more tokens behind it."""

    ids: list[int]
    images: list[PlacedImage]
    logits: np.ndarray
    after: np.ndarray

    @classmethod
    def load(cls, name: str, prompt: str) -> Golden:
        merge = 1 if name == "gemma4_unified" else 2
        mean, deviation = (0.0, 1.0) if name.startswith("gemma4") else (0.5, 0.5)
        with np.load(GOLDENS / name / "golden.npz") as file:
            grids = file[f"{prompt}.grids"].tolist()
            images = [
                PlacedImage(
                    offset=int(offset),
                    patches=patches(file[f"{prompt}.pixels.{n}"], *grids[n], merge, mean=mean, deviation=deviation),
                )
                for n, offset in enumerate(file[f"{prompt}.offsets"])
            ]
            return cls(file[f"{prompt}.ids"].tolist(), images, file[f"{prompt}.logits"], file[f"{prompt}.after"])


AFTER = [5, 9, 17]
"""The tokens that `Golden.after` is about."""


def patches(
    pixels: np.ndarray, rows: int, columns: int, merge: int = 2, *, mean: float = 0.5, deviation: float = 0.5
) -> ImagePatches:
    return ImagePatches.of(
        rows=rows,
        columns=columns,
        tokens=rows * columns // merge**2,
        pixels=pixels.tobytes(),
        mean=(mean,) * 3,
        deviation=(deviation,) * 3,
    )


class SeeingRows:
    """Rows that may have images, each with its caches; every call feeds each the next tokens that it is given."""

    def __init__(self, model: Model, prompts: Sequence[tuple[Sequence[int], Sequence[PlacedImage]]]) -> None:
        self.model = model
        self.prompts = prompts
        self.caches = [model.new_caches() for _ in prompts]
        self.positions = [0] * len(prompts)
        vision = vision_of(model)
        assert vision is not None
        self.layouts = [vision.layout(len(ids), images) if images else None for ids, images in prompts]
        self.features = [[vision.encode(image.patches) for image in images] for _, images in prompts]

    def batch(self, counts: Sequence[int], more: Sequence[int] = ()) -> Batch:
        """The next tokens of every row; behind a prompt's end those of `more`."""
        spans: list[Span] = []
        tokens: list[int] = []
        features: list[Features] = []
        for row, count in enumerate(counts):
            if not count:
                continue
            ids, images = self.prompts[row]
            start, at = self.positions[row], len(tokens)
            for image, rows in zip(images, self.features[row], strict=True):
                low, high = max(image.offset, start), min(image.end, start + count)
                if low < high:
                    features.append(Features(at + low - start, rows[low - image.offset : high - image.offset]))
            extra: dict[str, Any] = {"layout": self.layouts[row]}
            spans.append(Span(at, count, start, self.caches[row], **extra))
            tokens += [*ids, *more][start : start + count]
            self.positions[row] += count
        return Batch(mx.array(tokens, mx.int32), spans, features=features)

    def logits(self, counts: Sequence[int], more: Sequence[int] = ()) -> np.ndarray:
        hidden = self.model.forward(self.batch(counts, more)).final
        return np.array(self.model.logits(hidden).astype(mx.float32))


def seen(model: Model, golden: Golden, sizes: Sequence[int] = (), more: Sequence[int] = ()) -> np.ndarray:
    """Logits of a golden's prompt (and `more`) in chunks of these sizes, over and over; in one without.

    Chunks give way where a model's images must not be cut.
    """
    rows = SeeingRows(model, [(golden.ids, golden.images)])
    vision = vision_of(model)
    assert vision is not None
    images = RowImages(golden.images, vision, len(golden.ids))
    total, parts, turn = len(golden.ids) + len(more), [], 0
    while rows.positions[0] < total:
        at = rows.positions[0]
        count = images.whole(at, min(sizes[turn % len(sizes)] if sizes else total, total - at))
        parts.append(rows.logits([count], more))
        turn += 1
    return np.concatenate(parts)
