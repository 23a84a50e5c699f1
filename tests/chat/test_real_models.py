"""The text side of the two real models of development."""

from __future__ import annotations

import time

import pytest

from arriero.chat.messages import Conversation, Message
from arriero.chat.model_text import ModelText
from arriero.source import GGUFSource
from tools.models import FetchError, fetch

pytestmark = pytest.mark.real


def opened(name: str) -> tuple[ModelText, float]:
    try:
        path = fetch(name)
    except FetchError as error:
        pytest.skip(str(error))
    start = time.process_time()
    return ModelText.open(GGUFSource((str(path),))), time.process_time() - start


def test_smollm2_knows_its_turns() -> None:
    text, seconds = opened("smollm2")
    ids = text.encode(text.render(Conversation(messages=[Message(role="user", content="What is 12?")])))
    assert text.tokenizer.decode(ids) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is 12?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids[:4] == [1, 9690, 198, 2683]
    assert text.stop_ids == {2}
    assert text.context_length == 8192
    assert seconds < 2, "the target is 0.6 seconds; a busy machine takes longer"


def test_smollm2_cuts_numbers_into_digits() -> None:
    text, _ = opened("smollm2")
    pieces = [text.tokenizer.token_text(index) for index in text.tokenizer.encode("year 2026")]
    assert pieces == ["year", "Ġ", "2", "0", "2", "6"]


def test_gemma3_tokenizes_as_its_sentencepiece_model() -> None:
    text, seconds = opened("gemma3")
    # Made with sentencepiece from the pieces, scores and types of this file.
    assert text.encode("hello  world 12345") == [
        2,
        23391,
        138,
        12392,
        236743,
        *(236770, 236778, 236800, 236812, 236810),
    ]
    assert text.encode("  a\n\n\n\tb   c") == [2, 138, 236746, 109, 255968, 236763, 139, 236755]
    assert text.encode("漢字 👩‍👩‍👧") == [2, 201637, 236743, 243767, 237243, 243767, 237243, 244814]
    assert text.stop_ids == {1}
    assert text.context_length == 32768
    assert seconds < 8, "the target is 3 seconds; a busy machine takes longer"
