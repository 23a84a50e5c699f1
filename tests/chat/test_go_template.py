"""Go's template language, as far as chat templates use it."""

from __future__ import annotations

import itertools
import random
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from arriero.chat.go.template import GoTemplate
from arriero.chat.messages import Conversation, Message, Tool, ToolCall
from arriero.chat.model_text import ModelText
from arriero.chat.renderers.jinja import JinjaRenderer
from arriero.chat.renderers.prompt import Text
from arriero.chat.template import TemplateStopped
from arriero.chat.templates import ChatTemplates
from arriero.errors import TemplateError
from tests.chat.conversations import BRNO, GRID, NOTE, OSTRAVA, SUN, WEATHER, Q, assistant, result, system, user
from tests.helpers.text_models import CHATML, folder

TURNS = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "A"},
    {"role": "assistant", "content": "B"},
    {"role": "user", "content": "C"},
]
# Of the shape that libraries of models give to templates with tools.
TOOLS = """{{- if or .System .Tools }}<|im_start|>system
{{- if .System }}
{{ .System }}
{{- end }}
{{- if .Tools }}

# Tools
<tools>
{{- range .Tools }}
{"type": "function", "function": {{ .Function }}}
{{- end }}
</tools>
{{- end }}<|im_end|>
{{ end }}
{{- range $i, $_ := .Messages }}
{{- $last := eq (len (slice $.Messages $i)) 1 -}}
{{- if eq .Role "user" }}<|im_start|>user
{{ .Content }}<|im_end|>
{{ else if eq .Role "assistant" }}<|im_start|>assistant
{{ if and $.IsThinkSet (and .Thinking (or $last .ToolCalls)) -}}
<think>{{ .Thinking }}</think>
{{ end -}}
{{ if .Content }}{{ .Content }}
{{- else if .ToolCalls }}<tool_call>
{{ range .ToolCalls }}{"name": "{{ .Function.Name }}", "arguments": {{ .Function.Arguments }}}
{{ end }}</tool_call>
{{- end }}{{ if not $last }}<|im_end|>
{{ end }}
{{- else if eq .Role "tool" }}<|im_start|>user
<tool_response>
{{ .Content }}
</tool_response><|im_end|>
{{ end }}
{{- if and (ne .Role "assistant") $last }}<|im_start|>assistant
{{ end }}
{{- end }}"""


def text(source: str, messages: list[dict[str, Any]] | None = None, **arguments: Any) -> str:
    return GoTemplate(source).render({"messages": TURNS if messages is None else messages} | arguments)


def shown(source: str, messages: list[Message], tools: list[Tool] | None = None, **options: Any) -> str:
    made = JinjaRenderer(ChatTemplates({"default": source}), {})
    return made.render(Conversation(messages=messages, tools=tools or []), **options).text


@pytest.mark.parametrize(
    ("source", "written"),
    [
        ("{{ range .Messages }}{{ .Role }}:{{ .Content }};{{ end }}", "system:S;user:A;assistant:B;user:C;"),
        ("{{range $i, $m := .Messages}}{{$i}}{{$m.Content}}{{end}}", "0S1A2B3C"),
        ("{{ range .Messages -}}\n {{ .Content }}\n\n{{- end }} x", "SABC x"),
        ("a {{- /* no */ -}} b{{ .Messages | len }}", "ab4"),
        ("{{/* two\nlines */}}{{ len .Messages }}", "4"),
        ("{{ with .System }}[{{ . }}]{{ else }}none{{ end }}{{ len .Messages }}", "[S]4"),
        ("{{ with .Tools }}some{{ else }}none{{ end }}{{ len .Messages }}", "none4"),
        ("{{ $n := 1 }}{{ range .Messages }}{{ $n = len .Content }}{{ end }}{{ $n }}", "1"),
        ("{{ $x := 1 }}{{ if true }}{{ $x := 2 }}{{ $x }}{{ end }}{{ $x }}{{ len .Messages }}", "214"),
        ("{{ range .Messages }}{{ if eq .Role `user` }}{{ continue }}{{ end }}{{ .Content }}{{ end }}", "SB"),
        ("{{ range .Messages }}{{ if eq .Role \"user\" }}{{ break }}{{ end }}{{ .Content }}{{ end }}", "S"),
        ("{{ range slice .Messages 2 }}{{ .Content }}{{ end }}", "BC"),
        ("{{ (index .Messages 1).Content }}{{ index .Messages 0 | json }}", 'A{"role":"system","content":"S"}'),
        ("{{ define \"t\" }}<{{ .Role }}>{{ end }}{{ range .Messages }}{{ template \"t\" . }}{{ end }}",
         "<system><user><assistant><user>"),
        ("{{ block \"t\" .System }}({{ . }}){{ end }}{{ len .Messages }}", "(S)4"),
        ('{{ if and .System (not .Tools) (or .Tools (eq (len .Messages) 4 5)) }}yes{{ end }}', "yes"),
        ('{{ if lt 1 2.5 }}a{{ end }}{{ if ge "b" "a" }}b{{ end }}{{ ne 1 1 }}{{ len .Messages }}', "abfalse4"),
        ('{{ printf "%s|%5d|%-3s|%q|%v|%%" .System 42 "a" "b\\n" true }}{{ len .Messages }}',
         'S|   42|a  |"b\\n"|true|%4'),
        ('{{ print 1 2 "a" 3 }}{{ println "x" 4 }}{{ len .Messages }}', "1 2a3x 4\n4"),
        ("{{ 1e6 }} {{ 2.50 }} {{ -3 }} {{ nil }}{{ len .Messages }}", "1000000 2.5 -3 4"),
        ("{{ .Nothing }}{{ len .Messages }}", "4"),
        ("{{ $.System }}{{ range .Messages }}{{ $.System }}{{ end }}", "SSSSS"),
        ("{{ range .Tools }}x{{ else }}no tools {{ end }}{{ len .Messages }}", "no tools 4"),
        ("{{ if eq .System \"x\" }}1{{ else if eq .System \"S\" }}2{{ else }}3{{ end }}{{ len .Messages }}", "24"),
        ('{{ "é" | len }} {{ slice "abc" 1 2 }}{{ len .Messages }}', "2 b4"),
    ],
)  # fmt: skip
def test_a_template_is_written_as_go_writes_it(source: str, written: str) -> None:
    assert text(source) == written


def test_the_date_is_todays() -> None:
    assert text("{{ currentDate }}{{ len .Messages }}") == f"{datetime.now():%Y-%m-%d}4"
    assert text('{{ currentDate "%d" }}{{ len .Messages }}') == f"{datetime.now():%Y-%m-%d}4"


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("{{ if .System }}", "line 1: {{ if }} has no end"),
        ("\n{{ end }}", "line 2: {{ end }} stands outside of a block"),
        ("{{ shout .System }}", "function shout is unknown; known are and, currentDate"),
        ("{{ 'x' }}", "unknown in an action"),
        ("{{ .System", "unknown in an action"),
        ("{{ (.System }}", "parenthesis"),
        ("{{ }}", "empty"),
        ("{{ .A .B }}", "only functions take arguments"),
        ("{{ if true }}{{ else range .Messages }}{{ end }}", "else"),
        ("{{ define `t` }}", "has no end"),
    ],
)
def test_what_is_none_of_the_language_is_named_with_its_line(source: str, complaint: str) -> None:
    with pytest.raises(TemplateError, match="Go template cannot be parsed, line") as error:
        GoTemplate(source)
    assert complaint in str(error.value)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("{{ range .Messages }}\n{{ .Tone }}{{ end }}", "line 2: .Tone is no field of a message; it has Content"),
        ("{{ .Messages.Foo }}", "has no fields"),
        ("{{ $x }}{{ .Messages }}", "variable $x is not declared"),
        ("{{ $x = 1 }}{{ .Messages }}", "variable $x is not declared"),
        ("{{ index .Messages 9 }}", "index 9 is out of a list of 4"),
        ("{{ slice .Messages 3 1 }}", "slice 3:1"),
        ('{{ lt 1 "a" }}{{ .Messages }}', "lt compares two numbers"),
        ('{{ template "x" . }}{{ .Messages }}', "'x' is not defined"),
        ("{{ break }}{{ .Messages }}", "loop where there is none"),
        ("{{ len 5 }}{{ .Messages }}", "no length"),
        ("{{ not 1 2 }}{{ .Messages }}", "not does not take 2"),
        ("{{ range true }}{{ .Messages }}{{ end }}", "no list and no map"),
        ("{{ 1 | .System }}{{ .Messages }}", "only functions take the value of a pipe"),
        ('{{ printf "%x" 5 }}{{ .Messages }}', "printf doesn't know"),
        ('{{ define "t" }}{{ template "t" . }}{{ end }}{{ template "t" . }}{{ .Messages }}', "50 deep"),
    ],
)
def test_a_template_that_fails_says_where(source: str, complaint: str) -> None:
    with pytest.raises(TemplateError) as error:
        text(source)
    assert complaint in str(error.value)


def test_a_template_that_runs_too_long_is_stopped() -> None:
    loop = "{{ range 900000 }}{{ range 900000 }}x{{ end }}{{ end }}{{ .Messages }}"
    with pytest.raises(TemplateStopped):
        GoTemplate(loop, seconds=0.2).render({"messages": TURNS})


OLD = "{{ if .System }}<s>{{ .System }}</s>{{ end }}{{ if .Prompt }}<u>{{ .Prompt }}</u>{{ end }}<a>{{ .Response }}</a>"


def test_a_template_of_the_old_kind_is_written_once_an_exchange() -> None:
    assert text(OLD, add_generation_prompt=True) == "<s>S</s><u>A</u><a>B</a><u>C</u><a>"
    assert text(OLD, TURNS[:3], add_generation_prompt=False) == "<s>S</s><u>A</u><a>B</a>"


def test_a_template_of_the_old_kind_without_a_response_gets_one_at_its_end() -> None:
    assert text("{{ .Prompt }}\n", add_generation_prompt=True) == "A\nBC\n"


def test_neighbours_of_one_role_are_joined() -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert text("{{ range .Messages }}[{{ .Content }}]{{ end }}", turns) == "[a\n\nb]"


def test_tools_calls_and_results_are_written() -> None:
    messages = [system("Be brief."), Q, assistant("", "hm", [BRNO, OSTRAVA]), SUN, result("rain <&>", 2)]
    assert shown(TOOLS, messages, [WEATHER], think=True) == (
        "<|im_start|>system\nBe brief.\n\n# Tools\n<tools>\n"
        '{"type": "function", "function": {"name":"weather","description":"Tells the weather of a town","parameters":'
        '{"type":"object","properties":{"town":{"type":"string","description":"Its name, <as> written & said"},'
        '"days":{"type":"integer","description":"How far ahead"},"units":{"type":"string","enum":["C","F"]}},'
        '"required":["town"]}}}\n</tools><|im_end|>\n'
        "<|im_start|>user\nWeather in Brno?<|im_end|>\n"
        '<|im_start|>assistant\n<think>hm</think>\n<tool_call>\n{"name": "weather", "arguments": '
        '{"town":"Brno","days":2}}\n{"name": "weather", "arguments": {"town":"Ostrava"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nsun\n</tool_response><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nrain <&>\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_properties_of_tools_are_walked() -> None:
    source = (
        "{{ range .Tools }}{{ .Function.Name }}({{ range $n, $p := .Function.Parameters.Properties }}{{ $n }}: "
        "{{ toTypeScriptType $p }}{{ if $p.Enum }} of {{ $p.Enum }}{{ end }}, {{ end }}) needs "
        "{{ .Function.Parameters.Required }}{{ end }}{{ len .Messages }}"
    )
    messages = [{"role": "user", "content": "x"}]
    assert text(source, messages, tools=[WEATHER.definition]) == (
        "weather(town: string, days: number, units: string of [C F], ) needs [town]1"
    )
    assert "place: Record<string, any>, points: any[], " in text(source, messages, tools=[NOTE.definition])


def test_an_answer_to_go_on_with_is_left_open() -> None:
    assert shown(TOOLS, [Q, assistant("It is ")]).endswith("<|im_start|>assistant\nIt is ")
    assert shown(OLD, [Q, assistant("It is ")]) == "<u>Weather in Brno?</u><a>It is "


def test_control_tokens_that_a_user_wrote_are_text() -> None:
    made = JinjaRenderer(ChatTemplates({"default": TOOLS}), {}, ["<|im_end|>", "<|im_start|>"])
    prompt = made.render(GRID["forged roles"])
    control = "".join(part.text for part in prompt.segments if isinstance(part, Text) and part.control)
    assert control.count("<|im_start|>") == 2


def test_a_tool_is_refused_where_the_template_is_of_the_old_kind() -> None:
    with pytest.raises(TemplateError, match="without a place for the role tool"):
        shown(OLD, [Q, assistant(calls=[ToolCall(name="f")]), SUN])


def test_what_a_template_reads_is_known() -> None:
    assert GoTemplate(TOOLS).variables == {"tools", "messages", "system", "thinking"}


def test_a_models_go_template_is_run(tmp_path: Path) -> None:
    opened = ModelText.open(folder(tmp_path / "m"), TOOLS)
    assert opened.render(Conversation(messages=[user("Hi")])).text == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert {"tools", "thinking"} <= set(opened.capabilities)


def test_a_go_template_that_shows_less_than_the_models_own_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML
    opened = ModelText.open(folder(tmp_path / "m", chat_template=own), "{{ .Prompt }}")
    assert opened.templates.sources == own
    assert "does not show tools" in caplog.text
    plain = ModelText.open(folder(tmp_path / "n", chat_template=CHATML), "{{ .Prompt }}!")
    assert plain.render(Conversation(messages=[user("Hi")])).text == "Hi!"


PARTS = [*"{{ }} - if end range .Messages .System $x := ( ) | len x".split(), " ", "\n", '"a"']


def ends_well(source: str) -> bool:
    """Whether a template is written, or complains as one of its kind."""
    try:
        return isinstance(text(source), str)
    except TemplateError as error:
        return "template" in str(error)


def test_random_templates_end_well() -> None:
    chance = random.Random(1)
    assert all(ends_well("".join(chance.choices(PARTS, k=chance.randint(1, 14)))) for _ in range(1500))


def test_every_cut_of_a_template_ends_well() -> None:
    cuts = itertools.combinations(range(0, len(TOOLS), 37), 2)
    assert all(ends_well(TOOLS[start:end]) for start, end in cuts)
