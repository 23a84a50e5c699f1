"""What a request's format means for a reply: where the grammar begins, and what may stand in its place."""

from __future__ import annotations

import re
from typing import Any

import pytest

from arriero.chat.grammar import Format, grammar_for, read_format
from arriero.chat.messages import Tool
from arriero.chat.parsers.families import FAMILIES
from arriero.errors import InvalidRequest
from arriero.runner.messages import Grammar
from tests.helpers.text_models import byte_level_metadata as metadata
from tests.helpers.text_models import fixture_id, tokenizer_of

ANY = Format("json_schema", "{}")
TOOLS = [Tool({"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}})]


def grammar(family: str, prompt: str, tools: bool = False) -> Grammar:
    return grammar_for(ANY, FAMILIES[family].parser(prompt, TOOLS if tools else []))


@pytest.mark.parametrize("value", [None, ""])
def test_nothing_is_no_format(value: Any) -> None:
    assert read_format(value) is None


def test_json_means_an_object() -> None:
    found = read_format("json")
    assert found is not None
    assert (found.kind, found.text) == ("json_schema", '{"type": "object"}')


def test_a_schema_keeps_the_order_of_its_properties() -> None:
    found = read_format({"type": "object", "properties": {"z": {"type": "null"}, "a": {"type": "null"}}})
    assert found is not None
    assert found.text.index('"z"') < found.text.index('"a"')


def test_a_schema_with_a_property_named_regex_is_a_schema() -> None:
    found = read_format({"properties": {"regex": {"type": "string"}}})
    assert found is not None
    assert found.kind == "json_schema"


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("yaml", "expected"),
        (3, "expected"),
        ({"not": {}}, "the keyword 'not' is not supported"),
        ({"regex": "("}, "unclosed group"),
        ({"lark": "a"}, "the grammar can't be used"),
        ({"enum": []}, "Unsatisfiable"),
        ({"regex": "a" * 1_100_000}, "at most"),
    ],
)
def test_what_can_not_be_used_is_refused_with_the_fields_name(value: Any, named: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^invalid text\.format: ") as raised:
        read_format(value, "text.format")
    assert named in str(raised.value)
    assert "\n" not in str(raised.value)


def test_thoughts_that_the_prompt_has_opened_come_first() -> None:
    thoughts = grammar("qwen", "<|im_start|>assistant\n<think>\n").thoughts
    assert thoughts is not None
    assert (thoughts.opened, re.search(thoughts.closing, "hm</think>") is not None) == (True, True)


def test_thoughts_may_be_opened_by_the_reply() -> None:
    thoughts = grammar("qwen", "<|im_start|>assistant\n").thoughts
    assert thoughts is not None
    assert (thoughts.opening, thoughts.opened) == (b"<think>", False)


@pytest.mark.parametrize(
    ("family", "prompt"),
    [("qwen", "<think>\n\n</think>\n\n"), ("gemma4", "<|channel>thought\n<channel|>"), ("passthrough", "x")],
)
def test_where_thoughts_are_over_or_unknown_the_grammar_begins_at_once(family: str, prompt: str) -> None:
    assert grammar(family, prompt).thoughts is None


def test_tags_with_signs_of_regular_expressions_are_taken_as_they_are() -> None:
    thoughts = grammar("mistral", "[/INST]").thoughts
    assert thoughts is not None
    assert re.search(thoughts.closing, "so [/THINK]") is not None
    assert re.search(thoughts.closing, "so T") is None


def test_a_tool_on_offer_may_be_called_instead() -> None:
    assert b"<tool_call>" in grammar("qwen", "", tools=True).calls
    assert grammar("qwen", "").calls == []


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>final<|message|>",
        "<|channel|>final <|constrain|>json<|message|>",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>",
    ],
)
def test_an_answer_in_channels_begins_behind_its_header(header: str) -> None:
    thoughts = grammar("harmony", "<|start|>user<|message|>x<|end|><|start|>assistant").thoughts
    assert thoughts is not None
    found = re.search(thoughts.closing, header)
    assert found is not None
    assert (found.end(), thoughts.opened) == (len(header), True)


def test_an_answer_that_the_prompt_has_begun_is_the_grammars() -> None:
    assert grammar("harmony", "<|start|>assistant<|channel|>final<|message|>").thoughts is None


def test_a_call_in_channels_may_end_the_reply_where_tools_are_on_offer() -> None:
    assert grammar("harmony", "<|start|>assistant", tools=True).calls_stop
    assert not grammar("harmony", "<|start|>assistant").calls_stop


def test_all_bytes_are_those_of_each_token_and_tags_are_special() -> None:
    tokenizer = tokenizer_of(metadata("qwen2"))
    tokens, special = tokenizer.all_bytes()
    assert tokens == [tokenizer.token_bytes(index) for index in range(tokenizer.vocab_size)]
    assert {fixture_id("<|im_end|>"), fixture_id("<|endoftext|>")} <= set(special)
    assert tokenizer.token_id("a") not in special
