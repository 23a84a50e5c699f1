"""What the log says about a prompt that was known in part."""

from __future__ import annotations

import logging
from types import SimpleNamespace

from arriero.runner.messages import PrefixUsed
from arriero.server.prefix_log import log_prefix


class Letters:
    """A tokenizer whose ids are letters."""

    def decode(self, ids):
        return "".join(chr(index) for index in ids)


MODEL = SimpleNamespace(asked="m", text=SimpleNamespace(tokenizer=Letters()))


def lines(caplog, prompt: str, used: PrefixUsed) -> list[str]:
    with caplog.at_level(logging.INFO):
        log_prefix(MODEL, [ord(letter) for letter in prompt], used)
    return [record.getMessage() for record in caplog.records]


def test_a_prompt_that_goes_on_says_only_how_much_was_known(caplog):
    assert lines(caplog, "hello", PrefixUsed("r", 5, 3, 2)) == ["m: 3 of 5 prompt tokens were known, 2 are restored"]


def test_a_broken_prefix_is_shown_with_the_text_around_it(caplog):
    used = PrefixUsed("r", 22, 14, 14, [ord(letter) for letter in "Monday, "])
    assert lines(caplog, "Today it is a Tuesday.", used)[1] == (
        "m: the prompt differs at token 14: ' is a ' is followed by 'Tuesda', stored is 'Monday'"
    )


def test_an_image_in_the_way_is_called_one(caplog):
    used = PrefixUsed("r", 5, 1, 1, [(1 << 31) + 7] * 8)
    assert "stored is 'an image'" in lines(caplog, "hello", used)[1]
