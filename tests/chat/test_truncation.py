"""Shortening conversations by whole exchanges (A12)."""

from __future__ import annotations

import pytest

from arriero.chat.messages import Conversation, Message, Tool, ToolCall
from arriero.chat.truncation import truncate
from arriero.errors import PromptTooLong


def count(conversation: Conversation) -> list[int]:
    """A prompt of one token per word of every message, and three per tool."""
    words = sum(len(message.content.split()) for message in conversation.messages)
    return [0] * (words + 3 * len(conversation.tools))


def turns(number: int) -> list[Message]:
    found = [Message(role="system", content="CODEWORD heron")]
    for turn in range(number):
        found += [
            Message(role="user", content=f"u{turn} x x x"),
            Message(role="assistant", content=f"a{turn} y y y y y"),
        ]
    return [*found, Message(role="user", content="last question")]


def test_a_conversation_that_fits_is_left_alone() -> None:
    conversation = Conversation(messages=turns(3))
    result = truncate(conversation, 1000, count)
    assert result.conversation is conversation
    assert (result.dropped, len(result.tokens)) == (0, 34)


def test_as_few_of_the_oldest_exchanges_as_needed_are_left_out() -> None:
    result = truncate(Conversation(messages=turns(40)), 54, count)
    contents = [message.content for message in result.conversation.messages]
    assert contents[0] == "CODEWORD heron"
    assert contents[-1] == "last question"
    assert contents[1].startswith("u35")
    assert result.dropped == 70
    assert len(result.tokens) == 54


@pytest.mark.parametrize("limit", range(4, 120, 7))
def test_the_result_is_the_longest_that_fits(limit: int) -> None:
    conversation = Conversation(messages=turns(11))
    result = truncate(conversation, limit, count)
    assert len(result.tokens) <= limit
    assert result.tokens == count(result.conversation)
    assert result.dropped == 0 or len(result.tokens) + 10 > limit


def test_calls_stay_with_their_results() -> None:
    messages = [
        Message(role="user", content="one one one"),
        Message(role="assistant", tool_calls=[ToolCall(name="f", id="1")]),
        Message(role="tool", content="r r r r", tool_call_id="1"),
        Message(role="assistant", content="done done"),
        Message(role="user", content="two"),
    ]
    result = truncate(Conversation(messages=messages), 8, count)
    assert [message.role for message in result.conversation.messages] == ["user"]
    assert result.dropped == 4


def test_the_last_exchange_is_kept_whole() -> None:
    messages = [
        Message(role="user", content="old old"),
        Message(role="assistant", content="old old"),
        Message(role="user", content="two"),
        Message(role="assistant", tool_calls=[ToolCall(name="f", id="1")]),
        Message(role="tool", content="r r", tool_call_id="1"),
    ]
    result = truncate(Conversation(messages=messages), 4, count)
    assert [message.role for message in result.conversation.messages] == ["user", "assistant", "tool"]


def test_neighbouring_user_messages_are_one_question() -> None:
    messages = [Message(role="user", content=f"q{number} q") for number in range(3)]
    with pytest.raises(PromptTooLong):
        truncate(Conversation(messages=messages), 4, count)


def test_late_system_messages_and_tools_are_kept() -> None:
    messages = [*turns(4)[:-1], Message(role="system", content="late rule"), Message(role="user", content="end")]
    result = truncate(Conversation(messages=messages, tools=[Tool({})]), 9, count)
    assert [message.content for message in result.conversation.messages] == ["CODEWORD heron", "late rule", "end"]
    assert len(result.conversation.tools) == 1


def test_what_can_not_be_shortened_is_an_error_with_the_numbers() -> None:
    with pytest.raises(PromptTooLong, match=r"has 44 tokens and the context window 3;.* need 4\."):
        truncate(Conversation(messages=turns(4)), 3, count)


def test_few_renderings_are_needed() -> None:
    calls = []

    def counting(conversation: Conversation) -> list[int]:
        calls.append(1)
        return count(conversation)

    truncate(Conversation(messages=turns(1000)), 100, counting)
    assert len(calls) <= 13
