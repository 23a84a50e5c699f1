"""Tokens → events: the same whatever the split, with log-probabilities that stay beside their text (A08, A10, T13)."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arriero.chat.parsers.marks import ThinkingTags
from arriero.chat.parsers.passthrough import PassthroughParser
from arriero.chat.parsers.reply import ReplyParser
from arriero.chat.tokenizer import Tokenizer
from arriero.runner.messages import TokenLogprob
from arriero.server.completion import join_deltas
from arriero.server.transcript import Delta, Transcript
from arriero.source import FolderSource
from tests.helpers.stored_model import SPECIAL, byte_tokenizer

MARKED = 'Grüße 👩‍👩‍👧 {"a": <b>} 漢字 🇨🇿 end'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "tokenizer.json").write_text(byte_tokenizer().to_str())
    return Tokenizer.open(FolderSource(str(folder)))


def run(tokenizer, tokens, stops=(), parser=None, sizes=(1,), logprobs=True) -> list[Delta]:
    """All events of a reply whose tokens come in groups of the given sizes, in turn."""
    transcript = Transcript(tokenizer, parser or PassthroughParser(), stops)
    deltas, at, turn = [], 0, 0
    while at < len(tokens) and not transcript.stopped:
        size = sizes[turn % len(sizes)]
        group = []
        for token in tokens[at : at + size]:
            group += transcript.feed(token, TokenLogprob(-float(token), []) if logprobs else None)
        deltas += join_deltas(group)
        at, turn = at + size, turn + 1
    return deltas + join_deltas(transcript.finish())


def folded(deltas) -> tuple[str, str, bytes]:
    return (
        "".join(delta.thinking for delta in deltas),
        "".join(delta.content for delta in deltas),
        b"".join(item.chosen.data for delta in deltas for item in delta.logprobs),
    )


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_text_and_log_probabilities_are_whole_whatever_the_split(tokenizer, sizes):
    data = MARKED.encode()
    assert folded(run(tokenizer, list(data), sizes=sizes)) == ("", MARKED, data)


def test_no_piece_holds_half_a_character(tokenizer):
    assert all("\ufffd" not in delta.content for delta in run(tokenizer, list(MARKED.encode())))


def test_an_unfinished_character_at_the_end_comes_out_once(tokenizer):
    assert folded(run(tokenizer, [*b"ab", 0xE6, 0xBC]))[1] == "ab\ufffd"


@settings(deadline=None)
@given(
    text=st.text("ab", max_size=24),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=4),
)
def test_the_cut_at_a_stop_string_does_not_depend_on_the_split(tokenizer, text, stops, sizes):
    one = run(tokenizer, list(text.encode()), stops, sizes=(1,))
    other = run(tokenizer, list(text.encode()), stops, sizes=sizes)
    assert folded(one) == folded(other)
    _, content, data = folded(one)
    assert data.decode() == content
    assert text.startswith(content)
    assert not any(stop in content for stop in stops)
    assert content == text or any(stop in text for stop in stops)


@pytest.mark.parametrize("stop", ["beta gamma", "b", "é", "👩‍👩‍👧", "aab"])
def test_nothing_of_a_stop_string_is_ever_sent(tokenizer, stop):
    text = f"alpha {stop}tail"
    deltas = run(tokenizer, list(text.encode()), [stop])
    assert folded(deltas)[1] == text[: text.index(stop)]


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4), text=st.text("a<{ />\n", max_size=20))
def test_thinking_then_text_with_loose_brackets_loses_nothing(tokenizer, sizes, text):
    reply = f"Need {text}x</think>\n\ny{text}z"
    thinking, content, data = folded(
        run(tokenizer, list(reply.encode()), parser=ReplyParser("<think>\n", tags=ThinkingTags()), sizes=sizes)
    )
    assert thinking == f"Need {text}x"
    assert content == f"y{text}z"
    assert data == reply.encode()


def test_a_partial_tag_at_the_end_is_flushed_to_the_right_field(tokenizer):
    assert folded(run(tokenizer, list(b"plan </thi"), parser=ReplyParser("<think>", tags=ThinkingTags())))[:2] == (
        "plan </thi",
        "",
    )


def test_hidden_tokens_have_no_text_but_their_log_probability(tokenizer):
    end = tokenizer.token_id("<|im_end|>")
    deltas = run(tokenizer, [*b"ab", end])
    assert folded(deltas)[1].startswith("ab")


def test_the_order_of_content_and_thinking_is_kept_when_they_come_at_once():
    pieces = [Delta(content="a"), Delta(content="b"), Delta(thinking="c"), Delta(content="d")]
    joined = [msgspec.structs.astuple(delta)[:2] for delta in join_deltas(pieces)]
    assert joined == [("ab", ""), ("", "c"), ("d", "")]


def test_without_log_probabilities_none_come_out(tokenizer):
    assert all(not delta.logprobs for delta in run(tokenizer, list(b"abc"), logprobs=False))


def test_a_tag_that_is_a_token_counts_only_where_it_came_as_one(tmp_path) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer((*SPECIAL, "<think>", "</think>")).to_str())
    made = Tokenizer.open(FolderSource(str(tmp_path)))
    opening, closing = made.token_id("<think>"), made.token_id("</think>")
    thought = [opening, *b"say </think> in it", closing, *b"and <think>so</think>"]
    for sizes in ((1,), (3,), (100,)):
        parser = ReplyParser("", tags=ThinkingTags())
        found = folded(run(made, thought, parser=parser, sizes=sizes))
        assert found[:2] == ("say </think> in it", "and <think>so</think>")


def test_a_tag_that_is_text_to_the_vocabulary_counts_as_text(tokenizer) -> None:
    data = b"<think>hm</think>so"
    assert folded(run(tokenizer, list(data), parser=ReplyParser("", tags=ThinkingTags())))[:2] == ("hm", "so")


def test_a_stop_string_may_begin_in_a_tag(tmp_path) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer((*SPECIAL, "<think>", "</think>")).to_str())
    made = Tokenizer.open(FolderSource(str(tmp_path)))
    reply = [*b"ab", made.token_id("<think>"), *b"cd"]
    assert folded(run(made, reply, stops=("k>cd",)))[1] == "ab<thin"
    assert folded(run(made, reply, stops=("k>ce",)))[1] == "ab<think>cd"


def test_circles_of_tags_that_show_nothing_are_noticed_and_circles_of_text_are_not(tmp_path) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer((*SPECIAL, "<think>", "</think>")).to_str())
    made = Tokenizer.open(FolderSource(str(tmp_path)))
    opening, closing = made.token_id("<think>"), made.token_id("</think>")

    def noticed(tokens: list[int]) -> int | None:
        """After how many tokens."""
        transcript = Transcript(made, ReplyParser("", tags=ThinkingTags(anywhere=True)))
        for count, token in enumerate(tokens, 1):
            transcript.feed(token)
            if transcript.loops:
                return count
        return None

    assert noticed([opening, *b"\n", closing] * 200) == 48
    assert noticed([*b"Well. ", *[opening, closing] * 200]) is not None
    assert noticed([*b"0, " * 400]) is None
    assert noticed([opening, *b"a", closing] * 200) is None
