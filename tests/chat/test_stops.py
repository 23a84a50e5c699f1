"""The stop set: a union of all files and the template, built in one place (C07, C10)."""

from __future__ import annotations

import ast
import logging
from pathlib import Path

import pytest

import arriero.chat
from arriero.chat.text import StreamDecoder
from tests.helpers.text_models import CHATML, byte_level_metadata, fixture_id, model, tokenizer_of

END = fixture_id("<|im_end|>")
START = fixture_id("<|im_start|>")
TEXT_END = fixture_id("<|endoftext|>")


def test_all_files_and_the_template_add_to_the_stop_set(tmp_path: Path) -> None:
    text = model(
        tmp_path / "m",
        generation_config={"eos_token_id": 5},
        config={"eos_token_id": [5, 7, 7]},
        tokenizer_config={"eos_token": "<|endoftext|>"},
        special_tokens_map={"eos_token": {"content": "<tag>", "lstrip": False}},
        chat_template=CHATML,
    )
    assert text.stop_ids == {5, 7, TEXT_END, fixture_id("<tag>"), END}


def test_no_stop_token_is_printed(tmp_path: Path) -> None:
    text = model(tmp_path / "m", generation_config={"eos_token_id": 5}, chat_template=CHATML)
    decoder = StreamDecoder(text.tokenizer)
    assert decoder.feed(sorted(text.stop_ids)) + decoder.flush() == ""


def test_an_ordinary_token_named_as_padding_keeps_its_text(tmp_path: Path) -> None:
    text = model(tmp_path / "m", config={"pad_token_id": 0}, chat_template=CHATML)
    assert StreamDecoder(text.tokenizer).feed([0]) == text.tokenizer.token_text(0) == "!"


@pytest.mark.parametrize("value", [None, [], [None], True, -1, 10**9, "5"])
def test_values_that_are_no_tokens_add_nothing(tmp_path: Path, value: object) -> None:
    text = model(tmp_path / "m", generation_config={"eos_token_id": value}, chat_template=CHATML)
    assert text.stop_ids == {END}


def test_a_declared_stop_outside_the_vocabulary_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        model(tmp_path / "m", generation_config={"eos_token_id": 10**6})
    assert "1000000" in caplog.text


def test_the_text_configuration_of_a_nested_config_counts(tmp_path: Path) -> None:
    assert model(tmp_path / "m", config={"text_config": {"eos_token_id": 9}}).stop_ids == {9}


def test_a_gguf_file_may_list_its_ends() -> None:
    """As the library's gpt-oss does, whose replies end with tokens that only the list names."""
    ends = {"tokenizer.ggml.eos_token_id": TEXT_END, "tokenizer.ggml.eos_token_ids": [TEXT_END, 5, 9]}
    metadata = byte_level_metadata("qwen2") | ends | {"tokenizer.chat_template": CHATML}
    assert tokenizer_of(metadata).stop_ids == {TEXT_END, 5, 9, END}


def test_the_ids_of_a_gguf_file_add_up() -> None:
    metadata = byte_level_metadata("qwen2") | {
        "tokenizer.ggml.eos_token_id": TEXT_END,
        "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.ggml.eom_token_id": 6,
        "tokenizer.chat_template": CHATML,
    }
    assert tokenizer_of(metadata).stop_ids == {TEXT_END, 5, 6, END}


def test_a_template_that_ends_the_last_reply_otherwise_stops_only_there(tmp_path: Path) -> None:
    # As gpt-oss: a reply in the history ends with one token, the reply being written with another one.
    template = (
        "{% for m in messages %}{{ m.content }}"
        "{% if loop.last and m.role == 'assistant' %}<|endoftext|>{% else %}<|im_end|>{% endif %}{% endfor %}"
    )
    assert model(tmp_path / "m", chat_template=template).stop_ids == {TEXT_END}


def test_a_template_that_only_starts_turns_stops_at_the_next_one(tmp_path: Path) -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
    assert model(tmp_path / "m", chat_template=template).stop_ids == {START}


def test_a_template_that_ends_turns_with_plain_text_adds_nothing(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n###\n{% endfor %}"
    assert model(tmp_path / "m", chat_template=template).stop_ids == frozenset()


def test_a_template_that_cannot_run_adds_nothing(tmp_path: Path) -> None:
    text = model(tmp_path / "m", generation_config={"eos_token_id": 5}, chat_template="{{ raise_exception('no') }}")
    assert text.stop_ids == {5}


def test_a_template_given_by_a_modelfile_decides_instead_of_the_models_own(tmp_path: Path) -> None:
    from arriero.chat.model_text import ModelText
    from tests.helpers.text_models import folder

    source = folder(tmp_path / "m", chat_template=CHATML)
    own = "{% for m in messages %}{{ m.content }}<|endoftext|>{% endfor %}"
    assert ModelText.open(source, own).stop_ids == {TEXT_END}


def test_exactly_one_function_builds_the_stop_set() -> None:
    package = Path(arriero.chat.__file__).parent
    places = []
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "eos_token_id" in node.value:
                places.append(path.name)
            if isinstance(node, ast.Attribute) and node.attr == "stop_ids" and isinstance(node.ctx, ast.Store):
                places.append(f"stored in {path.name}")
    # vocabulary.py: what closes a text of a WordPiece encoder, which stops nothing
    assert places == ["stored in model_text.py", *["stops.py"] * 3, "stored in tokenizer.py", "vocabulary.py"]
