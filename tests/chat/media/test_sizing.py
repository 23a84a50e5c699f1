"""Every family's sizing and patches against what the reference's image processors make of the same pictures."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from arriero.chat.media.gemma3 import Gemma3Media
from arriero.chat.media.gemma4 import Gemma4Media
from arriero.chat.media.media import Marks, Media
from arriero.chat.media.picture import read_picture
from arriero.chat.media.qwen import QwenMedia
from arriero.errors import CheckpointError, InvalidRequest
from arriero.image import ImagePatches
from tests.helpers.picture_files import SIZES, file_of, pixels, variants

GOLDENS = Path(__file__).parent / "goldens.npz"
MARKS = Marks("<image>", "", "<image>", "")
QWEN = QwenMedia(
    MARKS,
    {"patch_size": 16, "spatial_merge_size": 2},
    {"size": {"shortest_edge": 1 << 16, "longest_edge": 1 << 18}},
)
GEMMA4 = Gemma4Media(MARKS, {}, {})
GEMMA3 = Gemma3Media(MARKS, {"vision_config": {"image_size": 896, "patch_size": 14}}, {})


@cache
def pictures() -> dict[str, Image.Image]:
    sized = {f"{w}x{h}": Image.fromarray(pixels(w, h, w + h)) for w, h in SIZES}
    return sized | variants()


@pytest.fixture(scope="module")
def goldens() -> dict[str, np.ndarray]:
    with np.load(GOLDENS) as file:
        return dict(file)


def read(picture: Image.Image) -> Image.Image:
    """Through a file, as it comes."""
    return read_picture(file_of(picture))


def numbers(patches: ImagePatches, *, first: bool) -> np.ndarray:
    """What the tower is given, `[patches, values]`."""
    count = patches.rows * patches.columns
    raw = np.frombuffer(patches.pixels, np.uint8).astype(np.float32) / 255
    values = raw.reshape((count, 3, -1) if first else (count, -1, 3))
    shape = (3, 1) if first else (3,)
    mean, deviation = (np.array(v, np.float32).reshape(shape) for v in (patches.mean, patches.deviation))
    return np.asarray((values - mean) / deviation)


def sampled(values: np.ndarray) -> np.ndarray:
    flat = values.reshape(-1)
    return flat[np.linspace(0, flat.size - 1, 256).astype(np.int64)]


@pytest.mark.parametrize("name", list(pictures()))
def test_qwen_sizes_and_cuts_as_the_reference(goldens: dict[str, np.ndarray], name: str) -> None:
    patches = QWEN.cut(read(pictures()[name]))
    assert [patches.rows, patches.columns] == goldens[f"{name}.qwen.grid"].tolist()
    assert patches.tokens == patches.rows * patches.columns // 4
    np.testing.assert_allclose(sampled(numbers(patches, first=True)), goldens[f"{name}.qwen.values"], atol=1e-6)


@pytest.mark.parametrize("name", list(pictures()))
def test_gemma_4_sizes_and_cuts_as_the_reference(goldens: dict[str, np.ndarray], name: str) -> None:
    patches = GEMMA4.cut(read(pictures()[name]))
    assert [patches.rows, patches.columns, patches.tokens] == goldens[f"{name}.gemma4.grid"].tolist()
    np.testing.assert_allclose(sampled(numbers(patches, first=False)), goldens[f"{name}.gemma4.values"], atol=1e-6)


@pytest.mark.parametrize("name", list(pictures()))
def test_gemma_3_sizes_and_cuts_as_the_reference(goldens: dict[str, np.ndarray], name: str) -> None:
    patches = GEMMA3.cut(read(pictures()[name]))
    assert (patches.rows, patches.columns, patches.tokens) == (64, 64, 256)
    whole = numbers(patches, first=True).reshape(64, 64, 3, 14, 14).transpose(2, 0, 3, 1, 4)
    np.testing.assert_allclose(sampled(whole), goldens[f"{name}.gemma3.values"], atol=1e-6)


@given(width=st.integers(1, 20000), height=st.integers(1, 20000))
def test_qwen_keeps_to_its_bounds_whatever_the_picture(width: int, height: int) -> None:
    if max(width, height) > 200 * min(width, height):
        with pytest.raises(InvalidRequest, match="too long and thin"):
            QWEN.size(width, height)
        return
    across, down = QWEN.size(width, height)
    assert across % 32 == down % 32 == 0
    # A long side that has been brought to one block can't give any more.
    assert across * down <= QWEN.most or min(across, down) == 32
    assert across * down >= QWEN.least


@given(width=st.integers(1, 20000), height=st.integers(1, 20000))
def test_gemma_4_keeps_to_its_tokens_whatever_the_picture(width: int, height: int) -> None:
    across, down = GEMMA4.size(width, height)
    assert across % 48 == down % 48 == 0
    assert 1 <= across * down // 48**2 <= 280


def test_a_unified_gemma_4_takes_the_square_of_a_token_for_a_patch() -> None:
    picture = read(pictures()["rgb"])
    apart, whole = GEMMA4.cut(picture), Gemma4Media(MARKS, {}, {}, unified=True).cut(picture)
    assert (whole.rows * 3, whole.columns * 3, whole.tokens) == (apart.rows, apart.columns, apart.tokens)
    tall = np.frombuffer(apart.pixels, np.uint8).reshape(whole.rows, 3, whole.columns, 3, 16, 16, 3)
    merged = tall.transpose(0, 2, 1, 4, 3, 5, 6)
    assert merged.tobytes() == whole.pixels


def test_one_picture_has_one_identity_and_another_size_another() -> None:
    picture = read(pictures()["rgb"])
    assert QWEN.cut(picture).identity == QWEN.cut(picture.copy()).identity
    smaller = QwenMedia(MARKS, {}, {"size": {"shortest_edge": 1 << 12, "longest_edge": 1 << 14}})
    assert smaller.cut(picture).identity != QWEN.cut(picture).identity
    assert Gemma4Media(MARKS, {}, {"max_soft_tokens": 70}).cut(picture).identity != GEMMA4.cut(picture).identity


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"do_resize": False}, "do_resize"),
        ({"do_rescale": False}, "do_rescale"),
        ({"rescale_factor": 1.0}, "rescale_factor"),
        ({"resample": 1}, "resample"),
        ({"image_mean": [0.5]}, "image_mean"),
        ({"image_std": [1, 0, 1]}, "image_std"),
        ({"size": {"shortest_edge": -3}}, "shortest_edge"),
        ({"max_pixels": "many"}, "max_pixels"),
    ],
)
def test_settings_that_are_not_honoured_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        QwenMedia(MARKS, {}, settings)


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        ({}, {"do_pan_and_scan": True}, "do_pan_and_scan"),
        ({}, {"size": {"height": 224, "width": 896}}, "squares of 896"),
        ({"mm_tokens_per_image": 250}, {}, "do not make 250 tokens"),
    ],
)
def test_gemma_3_refuses_what_its_tower_cannot_take(
    config: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        Gemma3Media(MARKS, {"vision_config": {"image_size": 896, "patch_size": 14}} | config, settings)


def test_every_family_keeps_the_protocol() -> None:
    families: list[Media] = [QWEN, GEMMA4, GEMMA3]
    assert all(media.cut(Image.new("RGB", (40, 40))).tokens for media in families)
