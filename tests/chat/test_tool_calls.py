"""Calls of every family, told from text over every split (T01 – T12, W16, W17)."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import pytest

from arriero.chat.messages import Tool
from arriero.chat.parsers.events import Content, Event, Thinking, ToolCallEvent
from arriero.chat.parsers.families import FAMILIES, PARSER_NAMES, family_of
from arriero.chat.parsers.offered import typed
from tests.chat.test_text import splits
from tests.helpers.text_models import FIXTURES


def tool(name: str, **properties: Any) -> Tool:
    parameters = {"type": "object", "properties": properties}
    return Tool({"type": "function", "function": {"name": name, "parameters": parameters}})


STRING, INTEGER = {"type": "string"}, {"type": "integer"}
TOOLS = [
    tool("f", a=INTEGER, b=STRING, c={"type": "array"}),
    tool("ls"),
    tool("web_search", query=STRING, limit=INTEGER),
    tool("write_file", content=STRING),
    tool("log_event", day=INTEGER, tags={"type": "array"}, when=STRING, extra={"type": "object"}),
    tool("run", script={"type": "object"}),
]
Reply = tuple[str, str, list[tuple[str, Any]]]


def events_of(family: str, pieces: Sequence[str], prompt: str = "", tools: Sequence[Tool] = TOOLS) -> list[Event]:
    parser = FAMILIES[family].parser(prompt, tools)
    return [event for piece in pieces for event in parser.feed(piece)] + parser.flush()


def folded(events: Sequence[Event]) -> Reply:
    """Thinking, content, calls."""
    return (
        "".join(event.text for event in events if isinstance(event, Thinking)),
        "".join(event.text for event in events if isinstance(event, Content)),
        [(event.call.name, event.call.arguments) for event in events if isinstance(event, ToolCallEvent)],
    )


def read(family: str, text: str, prompt: str = "", tools: Sequence[Tool] = TOOLS) -> Reply:
    return folded(events_of(family, [text], prompt, tools))


def few_splits(text: str) -> list[list[str]]:
    """One piece, single characters, and every cut in two."""
    return [[text], list(text), *([text[:at], text[at:]] for at in range(1, len(text)))]


F1 = ("f", {"a": 1})
THINK = "assistant\n<think>\n"
CASES = [json.loads(line) for line in (FIXTURES / "replies.jsonl").read_text("utf-8").splitlines()]


@pytest.mark.parametrize("case", CASES, ids=[f"{case['family']}-{index}" for index, case in enumerate(CASES)])
def test_a_reply_is_read_whatever_the_split(case: dict[str, Any]) -> None:
    wanted = case["thinking"], case["content"], [tuple(call) for call in case["calls"]]
    for pieces in few_splits(case["text"]):
        assert folded(events_of(case["family"], pieces, case["prompt"])) == wanted, pieces


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "harmony"])
def test_without_tools_nothing_is_a_call(family: str) -> None:
    texts = [case["text"] for case in CASES if case["family"] == family]
    assert all(read(family, text, tools=[])[2] == [] for text in texts)


BROKEN = [
    ("qwen", '<tool_call>{"name": "f", "arguments": oops}</tool_call> after'),
    ("qwen", '<tool_call>{"arguments": {}}</tool_call>'),
    ("qwen", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("qwen", '<tool_call>{"name": "f", "arguments": {"a": 1'),
    ("qwen", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
    ("deepseek", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": -Infinity}<｜tool▁call▁end｜>'),
    ("qwen", "<tool_call>\n<function=f>\n<parameter=a>\n1"),
    ("qwen", "<tool_call>\n<function=f>\nnonsense\n</tool_call"),
    ("qwen", "the tag <tool_call> starts a call, <function=x> names it"),
    ("glm", "<tool_call>nobody<arg_key>a</arg_key></tool_call>"),
    ("gemma4", "<|tool_call>call:run:\nBEGIN_ARG:\nls\nEND_ARG"),
    ("gemma4", '<|tool_call>call:f{b:<|"|>x'),
    ("mistral", "[TOOL_CALLS]f[ARGS]{oops}"),
    ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{]"),
    ("lfm2", "<|tool_call_start|>[f(1)]<|tool_call_end|>"),
    ("harmony", "<|channel|>commentary to=functions.f<|message|>{oops"),
    ("harmony", "<|channel|>final"),
]


@pytest.mark.parametrize(("family", "text"), BROKEN)
def test_what_is_no_call_comes_out_as_content_to_the_character(family: str, text: str) -> None:
    for pieces in few_splits(text):
        assert folded(events_of(family, pieces)) == ("", text, []), pieces


def test_a_call_that_can_not_be_read_is_a_warning_once(caplog: pytest.LogCaptureFixture) -> None:
    read("qwen", "<tool_call>{oops} <tool_call>{oops}")
    assert caplog.text.count("can't be read") == 1


def test_an_answer_in_json_is_not_held_back() -> None:
    parser = FAMILIES["llama3"].parser("", TOOLS)
    assert parser.feed('{"answer": 12') == [Content("{"), Content('"answer": 12')]


def test_a_call_comes_out_when_its_end_is_written() -> None:
    parser = FAMILIES["qwen"].parser("", TOOLS)
    parser.feed('<tool_call>{"name": "ls"}</tool_cal')
    (event,) = parser.feed("l>")
    assert isinstance(event, ToolCallEvent)
    assert event.source == '<tool_call>{"name": "ls"}</tool_call>'


def test_parallel_calls_come_one_after_the_other() -> None:
    text = "".join(f'<tool_call>{{"name":"write_file","arguments":{{"content":"{n}"}}}}</tool_call>\n' for n in "ab")
    assert read("qwen", text)[2] == [("write_file", {"content": "a"}), ("write_file", {"content": "b"})]


def test_values_that_do_not_fit_their_type_stay_text() -> None:
    values = {"day": "2026-01-15", "tags": "red, green", "when": "now", "extra": "{not json"}
    elements = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    text = f"<tool_call>\n<function=log_event>\n{elements}</function>\n</tool_call>"
    assert read("qwen", text) == ("", "", [("log_event", values)])


def test_a_large_free_text_argument_is_read_in_no_time() -> None:
    value = ("rm \"-rf ' \\ \x00 </function </parameter { [ " * 2500)[:100_000]
    text = f"<tool_call>\n<function=run>\n<parameter=script>\n{value}\n</parameter>\n</function>\n</tool_call>"
    start = time.process_time()
    assert read("qwen", text) == ("", "", [("run", {"script": value})])
    assert time.process_time() - start < 0.05


HOSTILE = [
    ("qwen", '<tool_call>{"a":"' + "[" * 5),
    ("qwen", '<tool_call>{ "'),
    ("qwen", "<tool_call><function=f><parameter=b>"),
    ("qwen", "</parameter> "),
    ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>"),
    ("gemma4", '<|tool_call>call:f{b:<|"|>'),
    ("gemma4", "<|tool_call>call:f{b:[[[<tool_call|>"),
    ("gemma4", "<|channel>thought\n"),
    ("llama3", "[[[["),
    ("mistral", "[TOOL_CALLS]f[ARGS]{"),
    ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"),
    ("lfm2", "<|tool_call_start|>[f(((("),
    ("harmony", "<|channel|>analysis"),
    ("generic", '{"name": "f", "arguments": {"a": ['),
]


@pytest.mark.parametrize(("family", "unit"), HOSTILE)
@pytest.mark.parametrize("single", [False, True])
def test_time_is_linear_in_the_text(family: str, unit: str, single: bool) -> None:
    text = (unit * (60_000 // len(unit)))[:60_000]
    start = time.process_time()
    events = events_of(family, list(text) if single else [text])
    assert time.process_time() - start < 2.5
    assert events


def test_a_closing_tag_inside_an_argument_is_text() -> None:
    inside = "A block ends with </parameter> and then </tool_call> here.</parameter>"
    call = f"<tool_call>\n<function=write_file>\n<parameter=content>\n{inside}\n</parameter>\n</function>\n</tool_call>"
    wanted = ("write_file", {"content": inside})
    for pieces in few_splits(call + "\n" + call):
        assert folded(events_of("qwen", pieces)) == ("", "", [wanted, wanted])


def test_a_call_as_the_last_thing_of_thinking_counts() -> None:
    text = 'I will.\n<tool_call>{"name": "ls"}</tool_call>\n</think>\nLet me list the files:'
    for pieces in few_splits(text):
        assert folded(events_of("qwen", pieces, THINK)) == ("I will.", "Let me list the files:", [("ls", {})])


def test_a_call_in_thinking_is_a_draft_when_the_answer_makes_one() -> None:
    draft = '<tool_call>{"name": "ls"}</tool_call>'
    text = f'So {draft}</think><tool_call>{{"name": "f", "arguments": {{"a": 1}}}}</tool_call>'
    for pieces in few_splits(text):
        assert folded(events_of("qwen", pieces, THINK)) == (f"So {draft}", "", [F1])


@pytest.mark.parametrize(
    "thought",
    [
        'some models use <function=...>, others <tool_call>; I could call <tool_call>{"name": "x"` and so on',
        'a call is <tool_call>{"name": "ls"}</tool_call> and so on',
        'nobody has <tool_call>{"name": "nobody"}</tool_call>',
        '<tool_call>{"name": "ls", "arguments": {"unfinished": "',
    ],
)
def test_prose_about_calls_in_thinking_is_thinking_to_the_character(thought: str) -> None:
    text = thought + "</think>The answer."
    for pieces in few_splits(text):
        assert folded(events_of("qwen", pieces, THINK)) == (thought, "The answer.", [])


def test_a_call_before_thinking_is_closed_is_made() -> None:
    text = 'plan <tool_call>{"name": "ls"}</tool_call>'
    for pieces in few_splits(text):
        assert folded(events_of("qwen", pieces, THINK)) == ("plan", "", [("ls", {})])


def test_of_two_calls_in_open_thinking_both_are_made() -> None:
    text = '<tool_call>{"name": "ls"}</tool_call>\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    assert read("qwen", text, THINK) == ("", "", [("ls", {}), F1])


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{query:Paris, France<|"|>,limit:5}', {"query": "Paris, France", "limit": 5}),
        ("{query:'it'}", {"query": "it"}),
        ("{q:'it'}", {"q": "it"}),
        ("{query:[1,2}", {"query": "[1,2"}),
        ("{query:]}", {"query": "]"}),
        ('{query:<|"|>a', {"query": "a"}),
        ('{limit:7,query:<|"|>a, b}', {"limit": 7, "query": "a, b"}),
    ],
)
def test_misplaced_string_markers_are_repaired(body: str, arguments: dict[str, Any]) -> None:
    text = f"<|tool_call>call:web_search{body}<tool_call|>"
    for pieces in few_splits(text):
        assert folded(events_of("gemma4", pieces)) == ("", "", [("web_search", arguments)])


def test_a_call_behind_a_broken_one_is_still_made() -> None:
    text = '<|tool_call>call:f{b:<|"|>x}<tool_call|><|tool_call>call:ls{}<tool_call|>'
    assert read("gemma4", text)[2] == [("f", {"b": "x"}), ("ls", {})]


@pytest.mark.parametrize("value", ['{"a": 1}', "[1,2]", "42", "true", "null", ' "quoted" ', ""])
def test_a_string_that_looks_like_json_stays_a_string(value: str) -> None:
    element = f"<tool_call><function=write_file><parameter=content>\n{value}\n</parameter></function></tool_call>"
    assert read("qwen", element)[2] == [("write_file", {"content": value})]
    keyed = f"<tool_call>write_file<arg_key>content</arg_key><arg_value>{value}</arg_value></tool_call>"
    assert read("glm", keyed)[2] == [("write_file", {"content": value})]


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("null", "string", "null"),
        ("null", "string null", None),
        ("None", "integer", None),
        ("none", "string integer", "none"),
        ("TRUE", "boolean", True),
        ("yes", "boolean", "yes"),
        ("12", "integer", 12),
        ("12.5", "integer", "12.5"),
        ("1.0", "number", 1),
        ("1.5", "string number", 1.5),
        ("abc", "number string", "abc"),
        ("[1]", "array", [1]),
        ("[1", "array", "[1"),
        ('{"a": {"b": null}}', "object", {"a": {"b": None}}),
        ("true", "integer", "true"),
        ("NaN", "number", "NaN"),
        ("5", "", "5"),
        ("1" * 5000, "integer", "1" * 5000),
    ],
)
def test_text_becomes_the_first_type_that_it_fits(text: str, types: str, value: Any) -> None:
    found = typed(text, frozenset(types.split()))
    assert found == value
    assert type(found) is type(value)


def test_types_of_unions_are_merged() -> None:
    union = tool(
        "u", x={"anyOf": [{"type": "integer"}, {"oneOf": [{"type": "null"}]}]}, y={"type": "integer", "nullable": True}
    )
    values = "".join(f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in (("x", "null"), ("y", "5")))
    text = f"<tool_call>u{values}</tool_call>"
    assert read("glm", text, tools=[union])[2] == [("u", {"x": None, "y": 5})]


@pytest.mark.parametrize(
    ("template", "tokens", "family"),
    [
        ("{{ tools }}<tool_call> <function=", "", "qwen"),
        ("{{ tools }}[TOOL_CALLS]", "", "mistral"),
        ("{{ tools }}<|start|><|channel|><|message|>", "", "harmony"),
        ("{{ tools }}", "<|python_tag|>", "llama3"),
        ("{{ tools }}", "", "generic"),
        ("<|tool_call> call:", "", "gemma4"),
    ],
)
def test_the_family_is_told_from_template_and_vocabulary(template: str, tokens: str, family: str) -> None:
    found = family_of(template, lambda text: text == tokens, takes_tools="tools" in template)
    assert found.syntax == FAMILIES[family].syntax
    assert found.harmony == (family == "harmony")


def test_every_parser_name_is_of_a_family() -> None:
    assert set(PARSER_NAMES.values()) == set(FAMILIES)


def test_every_short_text_is_read_the_same_over_every_split() -> None:
    for text in ('<tool_call>{"name":"ls"}</tool_call>x', "<think>a</think> <function=ls></function>"):
        whole = read("qwen", text)
        for pieces in splits(text):
            assert folded(events_of("qwen", pieces)) == whole
