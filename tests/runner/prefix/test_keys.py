"""Keys: what tells prompts apart."""

from __future__ import annotations

import numpy as np
import pytest

from arriero.runner.prefix.keys import Media, common, row_keys


def test_a_prompts_keys_are_its_tokens():
    assert row_keys([3, 1, 2]).tolist() == [3, 1, 2]


def test_an_image_is_told_apart_from_another_and_from_any_token():
    """R-25: prompts that differ in the image alone share nothing from its first placeholder on."""
    tokens = [1, 9, 9, 9, 2]
    first = row_keys(tokens, [Media(1, 4, "one")])
    second = row_keys(tokens, [Media(1, 4, "two")])
    assert common(first, second) == 1
    assert common(first, row_keys(tokens)) == 1
    assert common(first, row_keys(tokens, [Media(1, 4, "one")])) == 5
    assert all(key >= 1 << 31 for key in first[1:4])


@pytest.mark.parametrize("lookahead", [0, 1])
def test_every_position_of_an_image_has_a_key_of_its_own(lookahead):
    """So that two images are as hard to confuse as their tokens are many, and a shifted one matches nothing."""
    keys = row_keys([1, *[9] * 200, 2], [Media(1, 201, "one")], lookahead)
    assert len(set(keys.tolist())) == len(keys)
    again = row_keys([1, *[9] * 200, 2, 5], [Media(1, 201, "one")], lookahead)
    assert common(keys, again) == len(keys)


def test_no_token_can_look_like_an_image():
    keys = row_keys([0, 9, (1 << 31) - 1], [Media(1, 2, "one")])
    assert [int(key) & 1 << 31 for key in keys] == [0, 1 << 31, 0]


def test_pairs_vouch_for_the_token_after_them():
    """R-51: where a draft looks one token ahead, two prompts part one position before their first difference."""
    first, second = row_keys([1, 2, 3, 4], lookahead=1), row_keys([1, 2, 3, 5], lookahead=1)
    assert len(first) == 3
    assert common(first, second) == 2
    image = row_keys([1, 9, 9, 2], [Media(1, 3, "one")], lookahead=1)
    assert common(image, row_keys([1, 9, 9, 2], [Media(1, 3, "two")], lookahead=1)) == 0


def test_another_look_ahead_is_refused():
    with pytest.raises(ValueError, match="0 or 1"):
        row_keys([1, 2], lookahead=2)


def test_what_two_have_in_common():
    assert common(row_keys([]), row_keys([1])) == 0
    assert common(row_keys([1, 2]), row_keys([1, 2, 3])) == 2
    assert common(np.array([5], np.uint64), row_keys([1])) == 0
