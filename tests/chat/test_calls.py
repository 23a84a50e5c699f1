"""Calls that a grammar makes, in every family's own way: what was drawn by chance is read back and fits its schema."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from arriero.chat.calls.forms import CallForm, form_of
from arriero.chat.calls.notation import ElementNotation
from arriero.chat.forced import call_format, strict_calls
from arriero.chat.grammar import grammar_for
from arriero.chat.messages import Tool, ToolCall
from arriero.chat.parsers.events import Event, Thinking, ToolCallEvent
from arriero.chat.parsers.families import FAMILIES
from arriero.errors import InvalidRequest, UnsupportedFeature
from tests.helpers.call_forms import Words, events_of

PLACE = {"type": "object", "properties": {"a": {"type": ["integer", "null"]}}, "required": ["a"]}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["C", '"F"']},
        "level": {"type": "integer", "minimum": 0, "maximum": 99},
        "note": {"type": "string", "minLength": 1, "maxLength": 6},
        "code": {"type": "string", "pattern": "^[a-c]{2}$"},
        "maybe": {"anyOf": [{"enum": ["x", "y"]}, {"type": "null"}]},
        "few": {"type": "array", "items": {"type": "string", "maxLength": 3}, "minItems": 1, "maxItems": 2},
        "place": {"$ref": "#/$defs/place"},
    },
    "required": ["level", "unit"],
    "additionalProperties": False,
    "$defs": {"place": PLACE | {"additionalProperties": False}},
}
SCHEMAS: dict[str, Any] = {
    "set_level": PARAMETERS,
    "stop": {"type": "object", "properties": {}, "additionalProperties": False},
}


def tool(name: str, parameters: Any, **more: Any) -> Tool:
    return Tool({"type": "function", "function": {"name": name, "parameters": parameters, **more}})


TOOLS = [tool("set_level", PARAMETERS, strict=True), tool("stop", SCHEMAS["stop"]), tool("any", {})]
FORMS = {
    "tagged": ("qwen", ""),
    "qwen's elements": ("qwen", "<function="),
    "glm's elements": ("glm", "<arg_key>"),
    "gemma4": ("gemma4", ""),
    "functiongemma": ("functiongemma", ""),
    "harmony": ("harmony", ""),
    "llama3": ("llama3", ""),
    "mistral": ("mistral", "[ARGS]"),
    "mistral with ids": ("mistral", "[CALL_ID][ARGS]"),
    "mistral's list": ("mistral", "[TOOL_CALLS] ["),
    "deepseek": ("deepseek", ""),
    "deepseek's fences": ("deepseek", "```json"),
    "deepseek's elements": ("deepseek", "｜DSML｜"),
    "kimi": ("kimi", ""),
    "cohere": ("cohere", ""),
    "minimax": ("minimax", ""),
    "seed": ("seed", ""),
}
WAYS = [(name, tokens) for name in FORMS for tokens in (True, False) if tokens or name != "harmony"]


def setting(name: str, tokens: bool) -> tuple[str, CallForm, Words]:
    """Family, form, and a vocabulary whose tags are tokens, or text."""
    family, template = FORMS[name]
    form = form_of(family, template, lambda _: False)
    assert form is not None
    inner = form.notation.tags if isinstance(form.notation, ElementNotation) else ()
    return family, form, Words([*form.tags, *inner] if tokens else [])


def read(family: str, words: Words, tokens: list[int]) -> list[Event]:
    prompt = "<|start|>assistant" if family == "harmony" else ""
    return events_of(FAMILIES[family].parser(prompt, TOOLS), words.tags, words.pieces(tokens))


def fitting(events: list[Event]) -> list[ToolCall]:
    """The calls, all of which fit; there is nothing else but thoughts."""
    calls = [event.call for event in events if isinstance(event, ToolCallEvent)]
    assert all(isinstance(event, ToolCallEvent | Thinking) for event in events), events
    for call in calls:
        jsonschema.validate(call.arguments, SCHEMAS.get(call.name, {"type": "object"}))
    assert {call.name for call in calls} <= {"set_level", "stop", "any"}
    return calls


@pytest.mark.parametrize(("name", "tokens"), WAYS)
def test_a_reply_that_must_call_is_read_as_calls_that_fit(name: str, tokens: bool) -> None:
    family, form, words = setting(name, tokens)
    parser = FAMILIES[family].parser("<|start|>assistant" if family == "harmony" else "", TOOLS)
    grammar = grammar_for(call_format(form, words.tag, TOOLS), parser, words.tag)
    drawn = [words.draw(grammar, seed) for seed in range(5)]
    whole = [tokens for tokens in drawn if tokens is not None]
    assert whole
    for reply in whole:
        assert fitting(read(family, words, reply))


OPENINGS = {
    "harmony": "<|channel|>commentary to=functions.set_level <|constrain|>json<|message|>",
    "llama3": '{"name": "set_level", "parameters": ',
}


@pytest.mark.parametrize(("name", "tokens"), WAYS)
def test_in_a_free_reply_a_strict_call_that_has_begun_fits(name: str, tokens: bool) -> None:
    family, form, words = setting(name, tokens)
    strict = [TOOLS[0], tool("stop", SCHEMAS["stop"], strict=True)]
    triggers = strict_calls(form, words.tag, strict)
    grammar = grammar_for(None, FAMILIES[family].parser("", TOOLS), words.tag, triggers)
    said = words.spell(OPENINGS.get(name, form.opening))
    free = words.begin(grammar)
    assert free.allowed().all()
    whole = [reply for seed in range(5) if (reply := words.draw(grammar, seed, said)) is not None]
    assert whole
    names = set()
    for reply in whole:
        (call,) = fitting(read(family, words, reply))
        names.add(call.name)
    assert names <= {"set_level", "stop"}


@pytest.mark.parametrize("other", ["stop_all", "stop.all", "stop-all", "nonstop"])
def test_a_tool_whose_name_holds_a_strict_ones_is_free(other: str) -> None:
    family, form, words = setting("harmony", True)
    strict = [tool("stop", SCHEMAS["stop"], strict=True), tool(other, {})]
    triggers = strict_calls(form, words.tag, strict)
    grammar = grammar_for(None, FAMILIES[family].parser("<|start|>assistant", strict), words.tag, triggers)
    for name, free in (("stop", False), (other, True)):
        row = words.begin(grammar)
        for token in words.spell(f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"):
            row.advance(token)
        assert bool(row.allowed().all()) is free


def test_a_text_that_must_be_long_does_not_hold_its_closing_tag() -> None:
    family, form, words = setting("qwen's elements", False)
    note = {"type": "string", "minLength": 40}
    offered = [tool("f", {"type": "object", "properties": {"note": note}, "required": ["note"]})]
    grammar = grammar_for(call_format(form, words.tag, offered), FAMILIES[family].parser("", offered), words.tag)
    row = words.begin(grammar)
    for byte in b"<tool_call>\n<function=f>\n<parameter=note>\nab\n</parameter":
        assert row.allowed()[byte]
        row.advance(byte)
    assert not row.allowed()[ord(">")]


def test_behind_a_strict_call_the_reply_is_free_until_the_next_one() -> None:
    family, form, words = setting("gemma4", True)
    grammar = grammar_for(None, FAMILIES[family].parser("", TOOLS), words.tag, strict_calls(form, words.tag, TOOLS))
    first = words.draw(grammar, 1, words.spell("Well. <|tool_call>"))
    assert first is not None
    second = words.draw(grammar, 2, [*first, *words.spell(" and <|tool_call>")])
    assert second is not None
    events = read(family, words, second)
    calls = [event.call for event in events if isinstance(event, ToolCallEvent)]
    assert len(calls) == 2
    assert "".join(event.text for event in events if not isinstance(event, ToolCallEvent)) == "Well.and"


def test_a_tag_spelled_in_other_tokens_begins_no_strict_call_where_it_is_a_token() -> None:
    family, form, words = setting("tagged", True)
    grammar = grammar_for(None, FAMILIES[family].parser("", TOOLS), words.tag, strict_calls(form, words.tag, TOOLS))
    row = words.begin(grammar)
    for byte in b"<tool_call>":
        row.advance(byte)
    assert row.allowed().all()
    row.advance(words.spell("<tool_call>")[0])
    assert not row.allowed().all()


def test_a_strict_call_in_thoughts_is_followed_by_more_of_them() -> None:
    family, form, words = setting("tagged", True)
    parser = FAMILIES[family].parser("<think>", TOOLS)
    grammar = grammar_for(None, parser, words.tag, strict_calls(form, words.tag, TOOLS))
    row = words.begin(grammar)
    for token in words.spell('Hm. <tool_call>{"name": "stop", "arguments": {}}\n'):
        row.advance(token)
    assert row.allowed()[words.spell("</tool_call>")[0]]
    row.advance(words.spell("</tool_call>")[0])
    assert row.phase.value == "thinking"


def test_without_strict_tools_nothing_is_asked_of_calls() -> None:
    _, form, words = setting("tagged", True)
    assert strict_calls(form, words.tag, TOOLS[1:]) == []
    assert strict_calls(form, words.tag, [tool("a", PARAMETERS, strict=word) for word in (False, None, "no")]) == []


def test_a_family_without_a_grammar_is_refused_when_it_must_call_and_warned_of_when_strict(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert form_of("lfm2", "", lambda _: False) is None
    with pytest.raises(UnsupportedFeature, match="has no grammar here"):
        call_format(None, lambda _: None, TOOLS)
    assert strict_calls(None, lambda _: None, TOOLS) == []
    assert "called like any other" in caplog.text


ODD = [
    ({"type": "object", "properties": {"a": {"not": {}}}}, "not"),
    ({"type": "object", "properties": {"a": {"type": "string", "format": "date"}}}, "format"),
    ({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
    ({"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}}, "$ref"),
    ({"type": "object", "properties": {}, "required": ["b"]}, "required"),
    ({"anyOf": [{"type": "string"}, {"type": "object"}]}, "type"),
    ({"type": "object", "properties": {"a": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}}, "oneOf"),
    ({"type": "object", "properties": {"a": {"oneOf": [{"enum": ["x"]}, {"type": "string"}]}}}, "oneOf"),
    ({"type": "object", "properties": {"a": {"type": "string", "pattern": "^a|b$"}}}, "pattern"),
    ({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a", {}]}, "required"),
    ({"type": "object", "properties": {"a": {"anyOf": 7}}}, "anyOf"),
    ({"type": "object", "properties": {"a": {"enum": []}}}, "enum"),
    ({"type": "object", "properties": {"a": {"type": "array", "minItems": "1"}}}, "minItems"),
    ({"type": "object", "properties": {"a": {"type": "array", "maxItems": {}}}}, "maxItems"),
    ({"type": "object", "properties": {"a": {"type": "string", "maxLength": True}}}, "maxLength"),
    ({"type": "object", "properties": ["a"]}, "properties"),
]


@pytest.mark.parametrize(("schema", "keyword"), ODD)
@pytest.mark.parametrize("name", ["gemma4", "qwen's elements"])
def test_a_keyword_that_a_notation_can_not_keep_is_named(schema: Any, keyword: str, name: str) -> None:
    _, form, words = setting(name, True)
    with pytest.raises(InvalidRequest, match=f"'odd': .*'{keyword}".replace("$", "\\$")):
        strict_calls(form, words.tag, [tool("odd", schema, strict=True)])


@pytest.mark.parametrize("name", ["gemma4", "qwen's elements", "tagged"])
def test_a_schema_without_a_bottom_is_refused(name: str) -> None:
    deep: dict[str, Any] = {"type": "object", "properties": {}}
    for _ in range(400):
        deep = {"type": "object", "properties": {"a": deep}}
    _, form, words = setting(name, True)
    with pytest.raises(InvalidRequest, match="'odd': "):
        strict_calls(form, words.tag, [tool("odd", deep, strict=True)])


@pytest.mark.parametrize("name", ["gemma4", "qwen's elements", "glm's elements"])
@pytest.mark.parametrize("pattern", [r"^https?:\/\/x$", "^https?://x$", r"^https?:[\/]{2}x$"])
def test_a_slash_in_a_pattern_may_be_escaped_or_not(name: str, pattern: str) -> None:
    schema = {
        "type": "object",
        "properties": {"at": {"type": "string", "pattern": pattern}},
        "required": ["at"],
        "additionalProperties": False,
    }
    family, form, words = setting(name, True)
    offered = [tool("go", schema)]
    grammar = grammar_for(call_format(form, words.tag, offered, many=False), FAMILIES[family].parser("", offered))
    drawn = words.draw(grammar, 0)
    assert drawn is not None
    assert b"".join(words.tokens[token] for token in drawn).count(b"://x") == 1


def test_a_call_that_can_not_be_kept_may_have_any_arguments_unless_it_is_strict(
    caplog: pytest.LogCaptureFixture,
) -> None:
    family, form, words = setting("gemma4", True)
    odd = tool("any", ODD[0][0])
    grammar = grammar_for(call_format(form, words.tag, [odd]), FAMILIES[family].parser("", TOOLS), words.tag)
    assert "'any' may be any" in caplog.text
    assert any(words.draw(grammar, seed) for seed in range(5))


def test_a_name_that_would_break_the_syntax_is_refused() -> None:
    _, form, words = setting("gemma4", True)
    with pytest.raises(InvalidRequest, match="use letters, digits"):
        call_format(form, words.tag, [tool("a{b", {})])


def test_one_call_alone_may_be_asked_for() -> None:
    family, form, words = setting("gemma4", True)
    parser = FAMILIES[family].parser("", TOOLS)
    for many, most in ((False, 1), (True, 16)):
        grammar = grammar_for(call_format(form, words.tag, TOOLS[1:2], many=many), parser, words.tag)
        reply = words.spell("<|tool_call>call:stop{}<tool_call|>")
        row = words.begin(grammar)
        for token in reply:
            row.advance(token)
        assert row.complete is (most == 1)
