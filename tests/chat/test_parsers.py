"""Streamed replies → events, over every split."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arriero.chat.parsers.events import Content, Event, Parser, Thinking
from arriero.chat.parsers.marks import ThinkingTags
from arriero.chat.parsers.passthrough import PassthroughParser
from arriero.chat.parsers.reply import ReplyParser
from tests.chat.test_text import splits


def run(parser: Parser, pieces: Sequence[str]) -> tuple[str, str]:
    """All thinking and all content; thinking must come first."""
    events: list[Event] = [event for piece in pieces for event in parser.feed(piece)] + parser.flush()
    kinds = [type(event) for event in events]
    assert Thinking not in kinds[kinds.index(Content) :] if Content in kinds else True
    assert all(event.text for event in events if isinstance(event, Thinking | Content))
    thinking = "".join(event.text for event in events if isinstance(event, Thinking))
    return thinking, "".join(event.text for event in events if isinstance(event, Content))


def thinker(prompt: str = "") -> ReplyParser:
    return ReplyParser(prompt, tags=ThinkingTags())


@pytest.mark.parametrize(
    ("prompt", "reply", "thinking", "content"),
    [
        ("", "<think>\nhm\n</think>\n\nYes.", "hm", "Yes."),
        ("", "Yes. <think> no", "", "Yes. <think> no"),
        ("", "\n <think>a</think>b", "a", "b"),
        ("", "  plain", "", "  plain"),
        ("", "<think></think>x", "", "x"),
        ("", "<think>\n\n</think>\n\nx", "", "x"),
        ("", "<think>never ends ", "never ends ", ""),
        ("", "<think>a</thi", "a</thi", ""),
        ("", "<thin", "", "<thin"),
        ("", "<thinker>x", "", "<thinker>x"),
        ("", "<think>a</think>", "a", ""),
        ("", "<think>a</think>b</think>c<think>", "a", "b</think>c<think>"),
        ("", "<think>a <think> b</think>c", "a <think> b", "c"),
        ("", "<think>a < b\n\n c</think>d", "a < b\n\n c", "d"),
        ("assistant\n<think>\n", "hm\n</think>\n\nYes.", "hm", "Yes."),
        ("assistant\n<think>\n", "<think>\nhm</think>Yes", "hm", "Yes"),
        ("assistant\n<think>\n", "\n\n</think>Yes", "", "Yes"),
        ("assistant\n<think>\n", "<th", "<th", ""),
        ("<think>\n\n</think>\n\n", "Yes <think>", "", "Yes <think>"),
        ("<think>\n\n</think>\n\n", " Yes", "", " Yes"),
        ("", "", "", ""),
    ],
)
def test_thinking_is_told_from_content_however_it_is_split(
    prompt: str, reply: str, thinking: str, content: str
) -> None:
    for pieces in splits(reply):
        assert run(thinker(prompt), pieces) == (thinking, content), pieces


def test_other_tags_work_the_same() -> None:
    parser = ReplyParser(tags=ThinkingTags("[THINK]", "[/THINK]"))
    assert run(parser, ["[THI", "NK]a[/", "THINK] b"]) == ("a", "b")


ALPHABET = st.sampled_from(["<think>", "</think>", "<", "think", ">", "/", " ", "\n", "a", "é"])


@given(
    parts=st.lists(ALPHABET, max_size=14),
    cuts=st.lists(st.integers(0, 60), max_size=8),
    prompt=st.sampled_from(["", "<think>", "</think>"]),
)
@settings(max_examples=500, deadline=None)
def test_any_text_gives_the_same_events_whatever_the_split(parts: list[str], cuts: list[int], prompt: str) -> None:
    text = "".join(parts)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(edges)]
    assert run(thinker(prompt), pieces) == run(thinker(prompt), [text])


@given(parts=st.lists(ALPHABET, max_size=14))
@settings(max_examples=300, deadline=None)
def test_no_visible_character_is_lost(parts: list[str]) -> None:
    text = "".join(parts)
    thinking, content = run(thinker(), list(text))
    kept = "".join((thinking + content).split())
    whole = "".join(text.split())
    # At most one pair of tags is taken out.
    assert len(whole) - len(kept) in (0, len("<think>"), len("<think></think>"))


def test_content_is_not_held_back_without_reason() -> None:
    parser = thinker()
    assert parser.feed("Hello ") == [Content("Hello ")]
    assert parser.feed("<think>") == [Content("<think>")]


def test_thinking_is_not_held_back_without_reason() -> None:
    parser = thinker("<think>")
    assert parser.feed("let me see") == [Thinking("let me see")]


def test_passthrough_gives_everything_as_content() -> None:
    assert run(PassthroughParser(), ["<think>", "", "a"]) == ("", "<think>a")
