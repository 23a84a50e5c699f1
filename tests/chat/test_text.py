"""Incremental detokenizing and stop strings, over every split (A08, A10)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arriero.chat.text import StopStrings, StreamDecoder
from arriero.chat.tokenizer import Tokenizer
from arriero.errors import InvalidRequest
from tests.helpers.text_models import byte_level_metadata, fixture, tokenizer_of

HARD = "ďábelské 漢字 👩‍👩‍👧 🇨🇿"


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    return tokenizer_of(byte_level_metadata("qwen2"))


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    return tokenizer_of(fixture("sentencepiece.json")["metadata"])


def one_by_one(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    decoder = StreamDecoder(tokenizer)
    return [*(decoder.feed((index,)) for index in ids), decoder.flush()]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_characters_split_over_tokens_come_out_whole(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(kind)
    pieces = one_by_one(tokenizer, tokenizer.encode(HARD, add_bos=False))
    assert "".join(pieces) == HARD
    assert not any("\ufffd" in piece for piece in pieces)


def test_every_single_byte_token_still_makes_the_text(byte_level: Tokenizer) -> None:
    spelled = {byte_level.token_bytes(index): index for index in range(byte_level.vocab_size)}
    ids = [spelled[bytes((byte,))] for byte in HARD.encode()]
    assert "".join(one_by_one(byte_level, ids)) == HARD


def test_an_unfinished_character_at_the_end_is_one_replacement(byte_level: Tokenizer) -> None:
    spelled = {byte_level.token_bytes(index): index for index in range(byte_level.vocab_size)}
    ids = [spelled[bytes((byte,))] for byte in "a漢".encode()[:-1]]
    assert one_by_one(byte_level, ids) == ["a", "", "", "\ufffd"]


def test_an_invalid_byte_makes_progress_at_once(byte_level: Tokenizer) -> None:
    spelled = {byte_level.token_bytes(index): index for index in range(byte_level.vocab_size)}
    ids = [spelled[bytes((byte,))] for byte in b"\xffa\x80"]
    assert one_by_one(byte_level, ids) == ["\ufffd", "a", "\ufffd", ""]


def test_pending_says_when_bytes_wait(byte_level: Tokenizer) -> None:
    spelled = {byte_level.token_bytes(index): index for index in range(byte_level.vocab_size)}
    decoder = StreamDecoder(byte_level)
    waiting = []
    for byte in "漢".encode():
        decoder.feed((spelled[bytes((byte,))],))
        waiting.append(decoder.pending)
    assert waiting == [True, True, False]


def test_stop_tokens_have_no_text_and_other_special_tokens_do(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a<|im_start|>b<|im_end|>")
    assert "".join(one_by_one(byte_level, ids)) == "a<|im_start|>b"


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_any_grouping_of_any_tokens_gives_the_full_decoding(data: st.DataObject) -> None:
    tokenizer = _shared()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    decoder, pieces, position = StreamDecoder(tokenizer, hidden=()), [], 0
    while position < len(ids):
        size = data.draw(st.integers(1, 5))
        pieces.append(decoder.feed(ids[position : position + size]))
        position += size
    assert "".join([*pieces, decoder.flush()]) == tokenizer.decode(ids, start=False)


_TOKENIZERS: list[Tokenizer] = []


def _shared() -> Tokenizer:
    if not _TOKENIZERS:
        _TOKENIZERS.append(tokenizer_of(byte_level_metadata("qwen2")))
    return _TOKENIZERS[0]


def splits(text: str) -> Iterator[list[str]]:
    """Every way to cut a short text, or every way to cut a longer one in at most three."""
    if len(text) <= 10:
        for mask in range(2 ** max(len(text) - 1, 0)):
            cuts = [0, *(at + 1 for at in range(len(text) - 1) if mask >> at & 1), len(text)]
            yield [text[start:end] for start, end in itertools.pairwise(cuts)]
        return
    yield list(text)
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            yield [text[:first], text[first:second], text[second:]]


def run(stops: Sequence[str], pieces: Sequence[str]) -> tuple[str, str | None]:
    matcher = StopStrings(stops)
    text = "".join(matcher.feed(piece) for piece in pieces)
    return text + matcher.flush(), matcher.stopped


def reference(stops: Sequence[str], text: str) -> tuple[str, str | None]:
    """Character by character: the first end of any stop, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["beta gamma"], "alpha beta gamma delta", "alpha "),
        (["aab", "ab"], "xaab", "x"),
        (["ab", "aab"], "aaab", "a"),
        (["a"], "abc", ""),
        (["👧"], "👩‍👩‍👧!", "👩‍👩‍"),
        (["abcd", "bc"], "abcd", "a"),
        (["aaa"], "aabaaab", "aab"),
        (["never"], "neve", "neve"),
        ([], "text", "text"),
        (["\n\n"], "a\nb\n\nc", "a\nb"),
    ],
)
def test_a_stop_string_cuts_the_text_however_it_is_split(stops: list[str], text: str, expected: str) -> None:
    for pieces in splits(text):
        assert run(stops, pieces)[0] == expected, pieces


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    text=st.text("abc", max_size=14),
    cuts=st.lists(st.integers(0, 14), max_size=6),
)
@settings(max_examples=500, deadline=None)
def test_stop_strings_equal_the_search_by_characters(stops: list[str], text: str, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(edges)]
    assert run(stops, pieces) == reference(stops, text)


def test_only_what_may_be_a_stop_string_waits() -> None:
    matcher = StopStrings(["beta gamma"])
    assert matcher.feed("alpha be") == "alpha "
    assert matcher.feed("st") == "best"


def test_nothing_comes_after_a_stop_string() -> None:
    matcher = StopStrings(["b"])
    assert [matcher.feed("ab"), matcher.feed("c"), matcher.flush()] == ["a", "", ""]


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="stop string is empty"):
        StopStrings(["a", ""])
