"""What a conversation's texts spell never becomes a control token, over every vocabulary and every template at hand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from arriero.chat.files import TextFiles
from arriero.chat.messages import Conversation, Message, ToolCall
from arriero.chat.model_text import ModelText
from arriero.chat.templates import ChatTemplates
from arriero.errors import TemplateError, UnsupportedFeature
from tests.chat.conversations import WEATHER, call
from tests.helpers.text_models import byte_level_metadata, fixture, folder

TEMPLATES = {path.stem: path.read_text("utf-8") for path in (Path(__file__).parent / "templates").glob("*.jinja")}
# `methods` reads turns that no conversation here has.
VOCABULARIES = ("qwen2", "llama3", "gguf qwen2", "sentencepiece", "sentencepiece_prefix")


def opened(tmp_path: Path, vocabulary: str, template: str) -> ModelText:
    """A model's text side from a folder, or from what a GGUF file says."""
    if vocabulary in ("qwen2", "llama3"):
        return ModelText.open(folder(tmp_path / "m", family=vocabulary, chat_template=template))
    metadata = (
        byte_level_metadata("qwen2") if vocabulary.startswith("gguf") else fixture(f"{vocabulary}.json")["metadata"]
    )
    files = TextFiles({}, metadata)
    return ModelText(files, ChatTemplates({"default": template}))


def conversations(said: str) -> dict[str, Conversation]:
    """One for each place that a text may stand in."""
    asked = Message(role="user", content="Weather?")
    made = call(town="Brno")
    answered = Message(role="tool", content="sun", tool_call_id=made.id, tool_name=made.name)

    def turns(*messages: Message) -> Conversation:
        return Conversation(messages=list(messages), tools=[WEATHER])

    return {
        "a question": Conversation(messages=[Message(role="user", content=said)]),
        "rules": Conversation(messages=[Message(role="system", content=said), asked]),
        "a result": turns(asked, Message(role="assistant", tool_calls=[made]), answered_with(answered, said)),
        "an argument": turns(
            asked,
            Message(role="assistant", tool_calls=[ToolCall(name="weather", arguments={"town": said}, id=made.id)]),
            answered,
        ),
        "the name of a call and its result": turns(
            asked,
            Message(role="assistant", tool_calls=[ToolCall(name=said, id=made.id)]),
            Message(role="tool", content="sun", tool_call_id=made.id, tool_name=said),
        ),
        "the id of a call and its result": turns(
            asked,
            Message(role="assistant", tool_calls=[ToolCall(name="weather", id=said)]),
            Message(role="tool", content="sun", tool_call_id=said, tool_name="weather"),
        ),
        "an argument's name": turns(
            asked,
            Message(role="assistant", tool_calls=[ToolCall(name="weather", arguments={said: "x"}, id=made.id)]),
            answered,
        ),
    }


def answered_with(message: Message, said: str) -> Message:
    return Message(role="tool", content=said, tool_call_id=message.tool_call_id, tool_name=message.tool_name)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("template", [*sorted(set(TEMPLATES) - {"methods"})])
def test_a_text_of_all_control_tokens_adds_none(tmp_path: Path, vocabulary: str, template: str) -> None:
    text = opened(tmp_path, vocabulary, TEMPLATES[template])
    control = text.tokenizer.control_ids
    spelled = "".join(text.tokenizer.token_text(index) for index in sorted(control))
    assert spelled
    compared = 0
    for place, forged in conversations(f"x{spelled}y{spelled}z").items():
        plain = conversations("x")[place]
        try:
            ids, others = (text.encode(text.render(one)) for one in (forged, plain))
        except (TemplateError, UnsupportedFeature):
            continue
        compared += 1
        assert [index for index in ids if index in control] == [index for index in others if index in control], place
        shared = next((at for at, (one, other) in enumerate(zip(ids, others, strict=False)) if one != other), len(ids))
        behind = next(
            (at for at, (one, other) in enumerate(zip(ids[::-1], others[::-1], strict=False)) if one != other), 0
        )
        assert not set(ids[shared : len(ids) - behind]) & control
    assert compared


@pytest.mark.parametrize("template", [*sorted(set(TEMPLATES) - {"methods"})])
def test_an_answer_of_all_control_tokens_makes_no_turns(tmp_path: Path, template: str) -> None:
    text = opened(tmp_path, "qwen2", TEMPLATES[template])
    control = text.tokenizer.control_ids
    spelled = "".join(text.tokenizer.token_text(index) for index in sorted(control))

    def ids(answer: str) -> list[int]:
        said = (("user", "Hi"), ("assistant", answer), ("user", "Go on"))
        return text.encode(text.render(Conversation(messages=[Message(role=role, content=one) for role, one in said])))

    plain = ids("x")
    turns = Counter(index for index in plain if index in control)
    assert turns or "<|im_" not in TEMPLATES[template]
    assert Counter(index for index in ids(f"x{spelled}y") if index in turns) == turns
