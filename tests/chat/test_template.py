"""Templates: equal to transformers (C04, C05), and a sandbox that hostile ones can't leave or fill."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from arriero.chat.go.template import GoTemplate
from arriero.chat.template import Template, TemplateStopped, is_go_template
from arriero.chat.templates import compiled
from arriero.errors import TemplateError
from tests.helpers.text_models import fixture

GOLDEN = fixture("templates.json")
TEMPLATES = Path(__file__).parent / "templates"


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: f"{case['template']}-{case['conversation']}")
def test_rendering_equals_that_of_transformers(case: dict[str, Any]) -> None:
    calls = case["conversation"] == "calls"
    template = Template((TEMPLATES / case["template"]).read_text("utf-8"))
    text = template.render(
        {
            "messages": GOLDEN[case["conversation"]],
            "tools": GOLDEN["tools"] if calls else None,
            "documents": None,
            "add_generation_prompt": True,
            "enable_thinking": calls,
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
        }
    )
    assert text == case["text"]


def test_the_date_is_todays() -> None:
    assert Template("{{ strftime_now('%Y') }}").render({}) == time.strftime("%Y")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'Name: {}'.format('x') }}", "Name: x"),
        ("{{ '{{\"n\": {}, 20250101}}'.format(7) }}", '{"n": 7, 20250101}'),
        ("{{ '{:>5}|{:.2f}'.format('a', 1) }}", "    a|1.00"),
        ("{{ '%5d|%s|100%%|2025123' % (1, 'a*b') }}", "    1|a*b|100%|2025123"),
        ("{{ 'since %s * 12345' | format(1) }}", "since 1 * 12345"),
    ],
)
def test_ordinary_formatting_is_no_attack(source: str, text: str) -> None:
    assert Template(source).render({}) == text


def test_a_large_template_runs() -> None:
    source = "{%- if x -%}yes{%- else -%}no{%- endif -%}" * 1000
    assert Template(source).render({"x": 1}) == "yes" * 1000


def test_an_error_of_the_template_names_its_line_and_text() -> None:
    with pytest.raises(TemplateError, match=r"line 3: roles must alternate"):
        Template("a\nb\n{{ raise_exception('roles must alternate') }}").render({})


def test_a_syntax_error_names_its_line() -> None:
    with pytest.raises(TemplateError, match=r"cannot be parsed, line 2"):
        Template("a\n{% if %}")


def test_an_error_in_an_expression_is_a_template_error() -> None:
    with pytest.raises(TemplateError, match="division"):
        Template("{{ 1 / 0 }}").render({})


def test_arguments_can_not_be_changed() -> None:
    messages: list[int] = []
    with pytest.raises(TemplateError, match="unsafe"):
        Template("{{ messages.append(1) }}").render({"messages": messages})
    assert messages == []


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ().__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns.__x = 1 %}",
        "{% include 'x' %}",
        "{{ lipsum(100) }}",
        "{{ '{0.__class__.__mro__}'.format(1) | length + 1 / 0 }}",
    ],
)
def test_the_sandbox_can_not_be_left(source: str) -> None:
    with pytest.raises(TemplateError):
        Template(source).render({})


DOUBLING = "{%% set ns = namespace(x=%s) %%}{%% for i in range(60) %%}{%% set ns.x = %s %%}{%% endfor %%}{{ %s }}"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**12) %}x{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{{ range(99999) | select('odd') | list | length }}{% endfor %}",
        "{% for i in range(2) recursive %}{{ loop(range(9)) }}{% endfor %}",
        "{% macro a() %}{{ a() }}{{ a() }}{% endmacro %}{{ a() }}",
        "{% macro a(n) %}{% if n %}{{ a(n - 1) }}{{ a(n - 1) }}{% endif %}{% endmacro %}{{ a(60) }}",
        "{{" + "(" * 50000 + "1" + ")" * 50000 + "}}",
        "{{ 'x' * 10**9 }}",
        "{{ 10**9 * 'x' }}",
        "{{ [1] * 10**9 }}",
        "{{ 2 ** (2 ** 40) }}",
        DOUBLING % ("'ab'", "ns.x ~ ns.x", "ns.x"),
        DOUBLING % ("'ab'", "ns.x + ns.x", "ns.x"),
        DOUBLING % ("[1]", "[ns.x, ns.x]", "ns.x"),
        DOUBLING % ("[1]", "[ns.x, ns.x]", "ns"),
        DOUBLING % ("[1]", "[ns.x, ns.x]", "ns.x | tojson"),
        DOUBLING % ("[1]", "[ns.x, ns.x]", "ns.x | string | length"),
        DOUBLING % ("[1]", "[ns.x, ns.x]", "'%s' % ns.x"),
        DOUBLING % ("[1]", "[ns.x, ns.x]", "'{}'.format(ns.x)"),
        DOUBLING % ("[1]", "[ns.x, ns.x]", "'' ~ ns.x"),
        DOUBLING % ("{'a': 1}", "{'a': ns.x, 'b': ns.x}", "ns.x.values()"),
        DOUBLING % ("9", "ns.x * ns.x", "1"),
        "{{ 'x' | center(1000000000) }}",
        "{{ 'x'.center(10**9) }}",
        "{{ 'x'.zfill(10**9) }}",
        "{{ (5).to_bytes(1000000000, 'big') }}",
        "{{ ('x' * 10000000).replace('', 'y' * 10000000) }}",
        "{{ ('x' * 1000000) | replace('', 'y' * 10000000) }}",
        "{{ ('x' * 1000000).join('y' * 1000000) }}",
        "{{ ('y' * 1000000) | join('x' * 1000000) }}",
        "{{ range(99999) | map('string') | join('x' * 1000000) }}",
        "{{ ('\t' * 1000000).expandtabs(1000000) }}",
        "{{ ('x\n' * 1000000) | indent(100000) }}",
        "{{ ('a' * 10000000).translate({97: 'b' * 1000000}) }}",
        "{{ ([1] * 1000000) | tojson(indent=1000000) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{w}}'.format(1, w=1000000000) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ range(9) | batch(1000000000, 'x') | list }}",
        "{{ [1] | slice(1000000000) | list }}",
        "{{ ([[1] * 999] * 9999) | sum(start=[]) | length }}",
        "{% for i in range(99999) %}{{ 'x' * 1000000 }}{% endfor %}",
        "{% set x %}{% for i in range(99999) %}{{ 'x' * 1000000 }}{% endfor %}{% endset %}",
        "{{ strftime_now('%Y' * 100000) }}",
        DOUBLING % ("[1]", "[ns.x, ns.x]", "ns.x == ns.x[1:] + ns.x[:1]"),
        DOUBLING % ("[1]", "[ns.x, ns.x]", "1 in [ns.x]"),
        DOUBLING % ("[1]", "[ns.x, ns.x]", "[ns.x] | select('eq', [1]) | list"),
        DOUBLING % ("[1]", "[ns.x, ns.x]", "[ns.x, [1]] | sort"),
        DOUBLING % ("[1]", "[ns.x, ns.x]", "[ns.x].index(1)"),
        DOUBLING % ("(1, 1)", "(ns.x, ns.x)", "{ns.x: 1}"),
        "{{ ('ab ' * 5000000).split() | sort | length }}",
        "{{ ('a' * 2000000) | wordwrap(1) }}",
        "{{ ('é' * 16000000).encode('punycode') }}",
    ],
    ids=lambda source: source[:60],
)
def test_a_hostile_template_is_stopped(source: str) -> None:
    start = time.monotonic()
    with pytest.raises(TemplateError) as caught:
        Template(source, seconds=0.3).render({})
    assert time.monotonic() - start < 3
    assert isinstance(caught.value, TemplateStopped) or "Range too big" in str(caught.value)


def test_a_template_of_more_than_a_quarter_of_a_million_characters_is_refused() -> None:
    with pytest.raises(TemplateError, match="characters"):
        Template("x" * (1 << 18) + "x")


def test_a_template_cannot_make_its_complaint_huge() -> None:
    with pytest.raises(TemplateError) as caught:
        Template("{{ raise_exception('x' * 1000000) }}").render({})
    assert len(str(caught.value)) < 3000


def test_a_long_conversation_is_no_attack() -> None:
    messages = [{"role": "user", "content": "word " * 200} for _ in range(2000)]
    source = "{% for m in messages %}{{ m.role ~ ': ' + m.content | trim }}{{ '\n' }}{% endfor %}"
    assert len(Template(source).render({"messages": messages})) > 2_000_000


@pytest.mark.parametrize(
    ("text", "go"),
    [
        ("{{ .Prompt }}", True),
        ("{{- if .System }}x{{ end }}", True),
        ("{{ range $i, $m := .Messages }}{{ $m.Content }}{{ end }}", True),
        ("{{- $last := eq (len (slice $.Messages $i)) 1 }}", True),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{{ messages[0].content }}", False),
        ("{{ index }} {{ end }}", True),
        ("{{ content }}", False),
        ("plain", False),
    ],
)
def test_go_templates_are_told_from_jinja(text: str, go: bool) -> None:
    assert is_go_template(text) is go


def test_a_template_is_compiled_in_its_own_language() -> None:
    assert isinstance(compiled("{{ if .System }}{{ .System }}{{ end }}{{ .Prompt }}"), GoTemplate)
    assert isinstance(compiled("{{ messages }}"), Template)
