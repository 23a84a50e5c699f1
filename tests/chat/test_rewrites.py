"""Rewritings of conversations that strict templates refuse, for any order of roles."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from arriero.chat.messages import Conversation, Message, ToolCall
from arriero.chat.renderers.jinja import JinjaRenderer
from arriero.chat.renderers.rewrites import readings
from arriero.chat.templates import ChatTemplates
from arriero.errors import TemplateError
from tests.chat.test_renderers import ALTERNATING, STRICT

FIRST = JinjaRenderer(ChatTemplates({"default": STRICT}), {})
IN_TURN = JinjaRenderer(ChatTemplates({"default": ALTERNATING}), {})
ROLES = st.lists(st.sampled_from(["system", "developer", "user", "assistant", "tool"]), max_size=8)


def conversation(roles: list[str]) -> list[Message]:
    """Each message says its number; assistant turns also think and call."""
    return [
        Message(
            role=role, content=f"m{index}", thinking=f"t{index}", tool_calls=[ToolCall(name="f", id=f"call_{index}")]
        )
        if role == "assistant"
        else Message(role=role, content=f"m{index}")
        for index, role in enumerate(roles)
    ]


@given(roles=ROLES)
@settings(max_examples=150, deadline=None)
def test_every_reading_says_everything_in_order(roles: list[str]) -> None:
    messages = conversation(roles)
    for reading in readings(messages):
        said = "\n\n".join(f"{message.thinking}\n\n{message.content}".strip() for message in reading)
        assert [part for part in said.split("\n\n") if part.startswith("m")] == [f"m{i}" for i in range(len(roles))]


@given(roles=ROLES)
@settings(max_examples=150, deadline=None)
def test_the_first_reading_is_the_conversation_and_none_comes_twice(roles: list[str]) -> None:
    messages = conversation(roles)
    found = list(readings(messages))
    assert found[0] is messages
    assert all(found[index] not in found[:index] for index in range(len(found)))


@given(roles=ROLES)
@settings(max_examples=150, deadline=None)
def test_system_messages_never_stop_a_template_that_wants_them_first(roles: list[str]) -> None:
    prompt = FIRST.render(Conversation(messages=conversation(roles)), add_generation_prompt=False)
    assert [f"m{index}" in prompt.text for index in range(len(roles))] == [True] * len(roles)


@given(roles=ROLES.filter(lambda roles: "tool" not in roles))
@settings(max_examples=150, deadline=None)
def test_a_template_that_wants_turns_to_alternate_takes_whatever_begins_with_a_user(roles: list[str]) -> None:
    spoken = [role for role in roles if role not in ("system", "developer")]
    alternate = all(a != b or a == "user" for a, b in itertools.pairwise(spoken))
    begins = bool(roles) and roles[0] != "assistant"
    try:
        text = IN_TURN.render(Conversation(messages=conversation(roles)), add_generation_prompt=False).text
    except TemplateError:
        assert not (alternate and begins)
    else:
        assert all(f"m{index}" in text for index in range(len(roles)))
