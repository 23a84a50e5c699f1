"""Make `tests/chat/media/goldens.npz`: what the reference's image processors make of the pictures of the tests.

    python tools/make_picture_goldens.py [FILE]

Needs torch, transformers and pillow. Kept are sizes, and of each array 256 values spread over it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.helpers.picture_files import SIZES, pixels, variants

HALF = [0.5, 0.5, 0.5]
QWEN = Qwen2VLImageProcessorPil(
    patch_size=16,
    merge_size=2,
    temporal_patch_size=2,
    size={"shortest_edge": 1 << 16, "longest_edge": 1 << 18},
    image_mean=HALF,
    image_std=HALF,
)
GEMMA4 = Gemma4ImageProcessorPil()
GEMMA3 = Gemma3ImageProcessorPil(
    size={"height": 896, "width": 896}, image_mean=HALF, image_std=HALF, do_pan_and_scan=False
)


def sampled(values: np.ndarray) -> np.ndarray:
    """256 values spread over an array."""
    flat = np.asarray(values, np.float32).reshape(-1)
    return flat[np.linspace(0, flat.size - 1, 256).astype(np.int64)]


def described(picture: Image.Image) -> dict[str, np.ndarray]:
    """What each family makes of a picture; a shape that one refuses is left out."""
    found: dict[str, np.ndarray] = {}
    try:
        qwen: Any = QWEN(picture, return_tensors="np")
        grid = qwen["image_grid_thw"][0]
        # One frame of the two equal ones, to compare with.
        values = qwen["pixel_values"].reshape(-1, 3, 2, 256)[:, :, 0]
        found |= {"qwen.grid": grid[1:], "qwen.values": sampled(values)}
    except ValueError as error:
        print("qwen", picture.size, error)
    try:
        gemma: Any = GEMMA4(picture, return_tensors="np")
        count, places = int(gemma["num_soft_tokens_per_image"][0]), gemma["image_position_ids"][0]
        real = places[:, 0] >= 0
        columns, rows = places[real].max(axis=0) + 1
        found["gemma4.grid"] = np.array([rows, columns, count])
        found["gemma4.values"] = sampled(gemma["pixel_values"][0][real])
    except ValueError as error:
        print("gemma4", picture.size, error)
    values = np.asarray(GEMMA3(picture, return_tensors="np")["pixel_values"])[0]
    found["gemma3.values"] = sampled(values)
    return found


def main(arguments: list[str]) -> None:
    default = Path(__file__).parents[1] / "tests" / "chat" / "media" / "goldens.npz"
    pictures = {f"{w}x{h}": Image.fromarray(pixels(w, h, w + h)) for w, h in SIZES} | variants()
    arrays = {f"{name}.{key}": value for name, picture in pictures.items() for key, value in described(picture).items()}
    np.savez_compressed(Path(arguments[0]) if arguments else default, **arrays)  # type: ignore[arg-type]


if __name__ == "__main__":
    main(sys.argv[1:])
