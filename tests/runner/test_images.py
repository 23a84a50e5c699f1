"""The images of a row: encoded once, when they are wanted, and let go behind their last token."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import pytest

from arriero.errors import InvalidRequest
from arriero.runner.images import RowImages


class CountingTower:
    """Rows that say which image and which of its tokens they are."""

    def __init__(self, atomic: bool = False) -> None:
        self.atomic = atomic
        self.encoded: list[int] = []

    def check(self, patches: SimpleNamespace) -> None: ...

    def layout(self, length: int, images: object) -> None:
        return None

    def encode(self, patches: SimpleNamespace) -> mx.array:
        self.encoded.append(patches.number)
        return mx.array([[100.0 * patches.number + i] for i in range(patches.tokens)])


def placed(number: int, offset: int, count: int) -> SimpleNamespace:
    return SimpleNamespace(offset=offset, end=offset + count, patches=SimpleNamespace(tokens=count, number=number))


def test_each_image_is_encoded_once_with_the_forward_that_wants_it_first():
    tower = CountingTower()
    images = RowImages([placed(1, 2, 6), placed(2, 10, 4)], tower, 20)
    assert images.features(0, 2, 0) == []
    assert tower.encoded == []
    first = images.features(2, 3, 7)
    assert [(each.start, each.rows.tolist()) for each in first] == [(7, [[100], [101], [102]])]
    assert [each.rows.tolist() for each in images.features(5, 6, 0)] == [[[103], [104], [105]], [[200]]]
    assert [each.rows.tolist() for each in images.features(11, 9, 0)] == [[[201], [202], [203]]]
    assert tower.encoded == [1, 2]


def test_what_an_image_was_encoded_to_goes_once_its_last_token_is_behind():
    """R-28: but not while a draft, which asks one position further on, still needs some of it."""
    tower = CountingTower()
    images = RowImages([placed(1, 2, 6)], tower, 20)
    images.features(2, 4, 0)
    assert images.features(3, 4, 0)[0].rows.tolist() == [[101], [102], [103], [104]]
    images.features(6, 3, 0)
    assert images.features(7, 3, 0)[0].rows.tolist() == [[105]]
    images.features(9, 3, 0)
    assert images._pending == []
    assert tower.encoded == [1]


def test_what_a_stored_prefix_knows_of_images_is_never_encoded():
    tower = CountingTower()
    images = RowImages([placed(1, 2, 6), placed(2, 10, 4)], tower, 20)
    assert len(images.features(9, 11, 0)) == 1
    assert tower.encoded == [2]


@pytest.mark.parametrize(
    ("start", "length", "whole"),
    [(0, 2, 2), (0, 5, 2), (0, 8, 8), (2, 3, 6), (4, 1, 4), (3, 9, 7), (12, 1, 2), (14, 6, 6), (0, 0, 0)],
)
def test_a_chunk_cuts_no_image_that_must_not_be_cut(start, length, whole):
    """R-26."""
    images = RowImages([placed(1, 2, 6), placed(2, 10, 4)], CountingTower(atomic=True), 20)
    assert images.whole(start, length) == whole
    assert RowImages([placed(1, 2, 6)], CountingTower(), 20).whole(start, length) == length


def test_an_image_at_the_end_leaves_a_token_to_begin_with():
    """R-26."""
    RowImages([placed(1, 2, 6)], CountingTower(), 8)
    with pytest.raises(InvalidRequest, match="a token must follow"):
        RowImages([placed(1, 2, 6)], CountingTower(atomic=True), 8)
