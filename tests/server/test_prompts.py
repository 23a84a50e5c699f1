"""Prompts behind a context."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from arriero.chat.files import TextFiles
from arriero.chat.messages import Conversation, Message
from arriero.chat.model_text import ModelText
from arriero.chat.templates import ChatTemplates
from arriero.server.prompts import ContinuedPrompt, ConversationPrompt
from tests.helpers.text_models import CHATML, fixture


def test_a_context_is_followed_by_no_second_beginning_of_a_sequence() -> None:
    files = TextFiles({}, fixture("sentencepiece.json")["metadata"])
    model: Any = SimpleNamespace(text=ModelText(files, ChatTemplates({"default": CHATML})), asked="m")
    bos = model.text.tokenizer.bos_id

    def asked() -> ConversationPrompt:
        return ConversationPrompt(model, Conversation(messages=[Message(role="user", content="Go on.")]), None)

    alone = asked().whole().tokens
    assert alone[0] == bos
    assert bos not in alone[1:]
    context = [*alone, alone[-1]]
    assert ContinuedPrompt(model, context, asked()).whole().tokens == [*context, *alone[1:]]
    assert ContinuedPrompt(model, [], asked()).whole().tokens == alone
