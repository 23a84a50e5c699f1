"""Files of pictures: what is read, how it is turned into RGB, and what is refused with which words."""

from __future__ import annotations

import logging
import struct
import sys
import zlib
from contextlib import suppress

import numpy as np
import pytest
from PIL import Image

from arriero.chat.media import picture
from arriero.chat.media.media import Cutter, Marks
from arriero.chat.media.picture import MAX_BYTES, read_picture
from arriero.chat.media.qwen import QwenMedia
from arriero.errors import InvalidRequest, UnsupportedFeature
from tests.helpers.picture_files import file_of, pixels, png


def rgb(width: int = 31, height: int = 17) -> Image.Image:
    return Image.fromarray(pixels(width, height))


@pytest.mark.parametrize("kind", ["PNG", "BMP", "GIF", "WEBP"])
def test_lossless_files_of_every_kind_give_their_pixels(kind: str) -> None:
    image = rgb().quantize(200).convert("RGB") if kind == "GIF" else rgb()
    options = {"lossless": True} if kind == "WEBP" else {}
    read = read_picture(file_of(image, kind, **options))
    assert read.mode == "RGB"
    np.testing.assert_array_equal(np.asarray(read), np.asarray(image))


def test_a_jpeg_is_read() -> None:
    read = read_picture(file_of(rgb(), "JPEG", quality=95))
    assert np.abs(np.asarray(read).astype(int) - np.asarray(rgb())).mean() < 12


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_a_cameras_orientation_is_applied(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if kind == "WEBP" else {}
    found = np.asarray(read_picture(file_of(rgb(), kind, exif=exif, **options)))
    a = np.asarray(rgb())
    expected = {
        1: a,
        2: a[:, ::-1],
        3: a[::-1, ::-1],
        4: a[::-1],
        5: a.transpose(1, 0, 2),
        6: a.transpose(1, 0, 2)[:, ::-1],
        7: a.transpose(1, 0, 2)[::-1, ::-1],
        8: a.transpose(1, 0, 2)[::-1],
    }[orientation]
    np.testing.assert_array_equal(found, expected)


def test_sixteen_bit_greys_keep_their_upper_half() -> None:
    """Pillow alone clips them: a dark picture would come out white."""
    grey = pixels(20, 30)[:, :, 0]
    deep = Image.fromarray(grey.astype(np.uint16) * 256 + 77)
    assert deep.mode == "I;16"
    found = np.asarray(read_picture(file_of(deep)))
    np.testing.assert_array_equal(found, np.repeat(grey[:, :, None], 3, axis=2))


def test_transparent_pixels_lie_on_white() -> None:
    image = rgb()
    image.putalpha(Image.new("L", image.size, 0))
    assert np.asarray(read_picture(file_of(image))).min() == 255


def test_of_an_animation_the_first_frame_counts_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    data = file_of(frames[0], "GIF", save_all=True, append_images=frames[1:])
    with caplog.at_level(logging.WARNING):
        assert np.asarray(read_picture(data))[0, 0].tolist() == [255, 0, 0]
    assert "first frame" in caplog.text


def png_header(width: int, height: int) -> bytes:
    """A PNG that says it is large and holds next to nothing."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"hi", "of no kind that is read here"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "of no kind that is read here"),
        (b"%PDF-1.7\n", "of no kind that is read here"),
        (file_of(rgb(), "TIFF"), "of no kind that is read here"),
        (png_header(9000, 9000), "9000 × 9000 pixels"),
        (png_header(12000, 12000), "too large"),
        (png_header(60000, 60000), "too large"),
        (png_header(100, 100), "damaged"),
        (png(40, 40)[:200], "damaged"),
        (file_of(rgb(300, 300), "JPEG")[:900], "damaged"),
    ],
    ids=["empty", "text", "svg", "pdf", "tiff", "large", "larger", "bomb", "hollow", "cut png", "cut jpeg"],
)
def test_what_is_no_picture_is_refused_in_words(data: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read_picture(data)


def test_a_file_of_too_many_bytes_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture, "MAX_BYTES", 100)
    with pytest.raises(InvalidRequest, match="at most 100 are taken"):
        read_picture(png(40, 40))
    assert MAX_BYTES > 10_000_000


@pytest.mark.parametrize("data", [b"RIFF\0\0\0\0WAVEfmt ", b"ID3\4\0\0\0\0\0\0", b"OggS\0\2"])
def test_sound_is_told_from_pictures(data: bytes) -> None:
    with pytest.raises(UnsupportedFeature, match="sound is not in this version"):
        read_picture(data)


def test_without_pillow_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    data = png(4, 4)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UnsupportedFeature, match=r"pip install 'arriero\[vision\]'"):
        read_picture(data)


def test_one_request_cuts_each_picture_once_and_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    cutter = Cutter(QwenMedia(Marks("<i>", "", "<i>", ""), {}, {}))
    first, second = png(40, 40, 1), png(40, 40, 2)
    assert cutter(first) is cutter(bytes(bytearray(first)))
    monkeypatch.setattr("arriero.chat.media.media.MAX_PREPARED", 300_000)
    with pytest.raises(InvalidRequest, match="send fewer or smaller ones"):
        cutter(second)


def test_bits_of_damage_anywhere_raise_nothing_else() -> None:
    rng = np.random.default_rng(1)
    good = [png(40, 30), file_of(rgb(), "JPEG"), file_of(rgb(), "GIF"), file_of(rgb(), "WEBP"), file_of(rgb(), "BMP")]
    for turn in range(300):
        data = bytearray(good[turn % len(good)])
        for place in rng.integers(0, len(data), 1 + turn % 7):
            data[place] = rng.integers(256)
        with suppress(InvalidRequest, UnsupportedFeature):
            assert read_picture(bytes(data)).mode == "RGB"
