"""What a renderer writes for a reply, the family's parser reads back."""

from __future__ import annotations

import pytest

from arriero.chat.files import TextFiles
from arriero.chat.messages import Conversation, Message, Tool, ToolCall
from arriero.chat.parsers.events import Content, Thinking, ToolCallEvent
from arriero.chat.parsers.families import Family, family_of
from arriero.chat.renderers.builtin.catalogue import RENDERERS, variables_of
from arriero.chat.renderers.jinja import JinjaRenderer
from arriero.chat.templates import ChatTemplates
from tests.chat.conversations import NOTE, WEATHER, call, user

ENDS = ("<|im_end|>\n", "<turn|>\n", "<|tool_response>", "<|eot_id|>", "<EOS>", "<|call|>", "<|return|>",
        "<｜end▁of▁sentence｜>", "<end_of_turn>\n")  # fmt: skip
ASKED = [user("Weather?")]
NOTED = call("note", tags=["a", "b"], place={"x": 1.5}, level=4, type='t "quoted" {x}')
TOOLS = [WEATHER, NOTE]
NO_CALLS = {"gemma3"}
NO_THOUGHTS = {"qwen3-instruct", "qwen3-next", "qwen3-vl-instruct", "qwen3-coder", "llama3", "mistral", "mistral-v11",
               "mistral-v13", "deepseek-v3", "deepseek3.1", "gemma3"}  # fmt: skip
ONE_CALL = {"llama3", "gpt-oss"}


def made(renderer: str) -> tuple[JinjaRenderer, Family]:
    built_in = RENDERERS[renderer]
    templates = ChatTemplates({"default": built_in.source}, variables_of(built_in, TextFiles({}, {})))
    family = family_of(templates.sources, lambda _: False, takes_tools="tools" in templates.variables)
    return JinjaRenderer(templates, {"bos_token": "<BOS>", "eos_token": "<EOS>"}), family


def read_back(renderer: str, reply: Message, tools: list[Tool]) -> tuple[str, str, list[ToolCall]]:
    """The reply, written as history and read as what the model said after the prompt."""
    writer, family = made(renderer)
    think = True if reply.thinking else None
    prompt = writer.render(Conversation(messages=ASKED, tools=tools), think=think).text
    whole = writer.render(
        Conversation(messages=[*ASKED, reply], tools=tools), think=think, add_generation_prompt=False
    ).text
    shared = len(prompt)
    while not whole.startswith(prompt[:shared]):
        # The prompt may open or close thinking in a way that history doesn't show.
        shared = prompt.rfind("\n", 0, shared - 1) + 1
    text, prompt = whole[shared:], prompt[:shared]
    for end in ENDS:
        text = text.removesuffix(end)
    parser = family.parser(prompt, tools)
    events = [event for char in text for event in parser.feed(char)] + parser.flush()
    return (
        "".join(event.text for event in events if isinstance(event, Thinking)),
        "".join(event.text for event in events if isinstance(event, Content)),
        [event.call for event in events if isinstance(event, ToolCallEvent)],
    )


def plain(calls: list[ToolCall]) -> list[tuple[str, object]]:
    return [(made.name, made.arguments) for made in calls]


@pytest.mark.parametrize("renderer", sorted(set(RENDERERS) - NO_CALLS))
def test_a_call_is_read_as_it_was_written(renderer: str) -> None:
    calls = [NOTED] if renderer in ONE_CALL else [call(town="Brno", days=2), NOTED]
    reply = Message(role="assistant", tool_calls=calls)
    thinking, content, found = read_back(renderer, reply, TOOLS)
    assert (thinking, content, plain(found)) == ("", "", plain(calls))


@pytest.mark.parametrize("renderer", sorted(set(RENDERERS) - NO_CALLS - {"llama3", "mistral", "mistral-v11"}))
def test_text_beside_a_call_is_read_as_it_was_written(renderer: str) -> None:
    reply = Message(role="assistant", content="Let me see.", tool_calls=[NOTED])
    thinking, content, found = read_back(renderer, reply, TOOLS)
    assert thinking + content == "Let me see."
    assert plain(found) == plain([NOTED])
    assert bool(thinking) == (renderer == "gpt-oss")  # its text before a call is analysis


@pytest.mark.parametrize("renderer", sorted(set(RENDERERS) - NO_THOUGHTS))
def test_thoughts_are_read_as_they_were_written(renderer: str) -> None:
    reply = Message(role="assistant", thinking="I know that.", content="Sunny.")
    assert read_back(renderer, reply, []) == ("I know that.", "Sunny.", [])


@pytest.mark.parametrize("renderer", sorted(set(RENDERERS) - NO_THOUGHTS - NO_CALLS))
def test_thoughts_before_a_call_are_read_as_they_were_written(renderer: str) -> None:
    reply = Message(role="assistant", thinking="I must look.", tool_calls=[NOTED])
    thinking, content, found = read_back(renderer, reply, TOOLS)
    assert (thinking, content, plain(found)) == ("I must look.", "", plain([NOTED]))


@pytest.mark.parametrize("renderer", sorted(set(RENDERERS) - NO_CALLS))
def test_a_reply_with_everything_is_accepted_as_history(renderer: str) -> None:
    writer, _ = made(renderer)
    calls = [call(town="Brno"), call("note", 2, tags=[])]
    results = [Message(role="tool", content="r", tool_call_id=made.id, tool_name=made.name) for made in calls]
    reply = Message(role="assistant", content="Text.", thinking="Thought.", tool_calls=calls)
    turns = [*ASKED, reply, *results, Message(role="assistant", content="Done.", thinking="So."), user("Thanks")]
    text = writer.render(Conversation(messages=turns, tools=TOOLS)).text
    assert "Brno" in text
    assert "Done." in text


def test_the_families_are_told_from_the_built_in_templates() -> None:
    assert made("gpt-oss")[1].harmony
    assert made("gemma3")[1].syntax is None
