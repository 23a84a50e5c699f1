"""A conversation that goes on keeps the tokens that it had: the next turn finds them stored."""

from __future__ import annotations

from pathlib import Path

import pytest

from arriero.chat.messages import Conversation, Message
from tests.helpers.text_models import CHATML, model

STRICT = (
    "{% if messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if m.role == 'system' %}{{ raise_exception('System message must be at the beginning.') }}"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def session(turns: int) -> list[Message]:
    """What an agent sends: notes of the system between the turns."""
    messages = [Message(role="system", content="You are a careful assistant.")]
    for turn in range(turns):
        messages.append(Message(role="user", content=f"Question {turn}: what is in file {turn}?"))
        if turn % 3 == 2:
            messages.append(Message(role="system", content=f"Note {turn}: today is day {turn}."))
        messages.append(Message(role="assistant", content=f"File {turn} holds {turn * 7} lines."))
    return [*messages, Message(role="user", content="Go on.")]


@pytest.mark.parametrize("template", [CHATML, STRICT], ids=["lenient", "strict"])
def test_notes_of_the_system_on_the_way_leave_the_beginning_alone(tmp_path: Path, template: str) -> None:
    """S04: each turn reads at most the new messages."""
    text = model(tmp_path / "m", chat_template=template)
    before: list[int] = []
    for turns in range(1, 11):
        messages = session(turns)
        now = text.encode(text.render(Conversation(messages=messages)))
        kept = text.encode(text.render(Conversation(messages=messages[:-1]))) if turns > 1 else []
        shared = next((i for i, (a, b) in enumerate(zip(before, now, strict=False)) if a != b), len(before))
        tail = len(text.encode(text.render(Conversation(messages=[Message(role="user", content="Go on.")]))))
        assert shared >= len(before) - tail
        assert len(kept) <= len(now)
        before = now
