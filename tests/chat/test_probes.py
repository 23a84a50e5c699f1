"""What templates leave out without a word is written in other ways."""

from __future__ import annotations

import pytest

from arriero.chat.messages import Conversation, Message, Think, ToolCall
from arriero.chat.renderers.jinja import JinjaRenderer
from arriero.chat.templates import ChatTemplates

KNOWS_USERS = (
    "{% for m in messages %}{% if m.role in ('user', 'assistant') or (m.role == 'system' and loop.first) %}"
    "[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
)
FIRST_CALL = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% if m.tool_calls %}<{{ m.tool_calls[0].function.name }}{{ m.tool_calls[0].function.arguments | tojson }}>"
    "{% endif %}{% endfor %}"
)


def text(template: str, messages: list[Message], think: Think = None) -> str:
    made = JinjaRenderer(ChatTemplates({"default": template}), {})
    return made.render(Conversation(messages=messages), add_generation_prompt=False, think=think).text


def said(*turns: str) -> list[Message]:
    return [Message(role=turn.partition(":")[0], content=turn.partition(":")[2]) for turn in turns]


def test_a_developer_message_that_would_vanish_is_a_system_message() -> None:
    assert text(KNOWS_USERS, said("developer:d", "user:u")) == "[system]d[user]u"


def test_a_late_system_message_that_would_vanish_is_the_users() -> None:
    turns = said("system:a", "user:b", "assistant:c", "system:d", "user:e")
    assert text(KNOWS_USERS, turns) == "[system]a[user]b[assistant]c[user]d[user]e"


def with_calls(count: int) -> list[Message]:
    calls = [ToolCall(name=name, arguments={}, id=f"call_{name}") for name in "fgh"[:count]]
    results = [Message(role="tool", content=f"r{call.name}", tool_call_id=call.id) for call in reversed(calls)]
    return [Message(role="assistant", content="t", tool_calls=calls), *results, *said("user:x")]


def test_calls_that_would_vanish_get_turns_of_their_own_with_their_results() -> None:
    assert text(FIRST_CALL, with_calls(3)) == (
        "[assistant]t<f{}>[tool]rf[assistant]<g{}>[tool]rg[assistant]<h{}>[tool]rh[user]x"
    )


def test_a_template_that_refuses_several_calls_gets_one_a_turn() -> None:
    strict = "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one') }}"
    assert text(strict + "{% endif %}{% endfor %}" + FIRST_CALL, with_calls(2)) == (
        "[assistant]t<f{}>[tool]rf[assistant]<g{}>[tool]rg[user]x"
    )


def test_a_single_call_stays_as_it_is() -> None:
    assert text(FIRST_CALL, with_calls(1)) == "[assistant]t<f{}>[tool]rf[user]x"


@pytest.mark.parametrize(
    ("known", "think", "level"),
    [
        ("low medium high", "max", "high"),
        ("low medium xhigh", "high", "xhigh"),
        ("low medium xhigh", "low", "low"),
        ("medium high", "low", "medium"),
        ("none", "high", "none"),
    ],
)
def test_a_level_of_thinking_is_the_nearest_that_the_template_accepts(known: str, think: Think, level: str) -> None:
    check = (
        "{% if reasoning_effort is defined and reasoning_effort not in '"
        + known
        + "'.split() %}{{ raise_exception('') }}"
    )
    template = check + "{% endif %}{{ reasoning_effort }}"
    if known == "none":
        template = "{{ 'none' }}"
    assert text(template, said("user:x"), think) == level
