"""Templates put together at random: an answer or a TemplateError, soon, and never another exception."""

from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from arriero.chat.template import Template
from arriero.errors import TemplateError, UnsupportedFeature

ATOMS = [
    "x",
    "ns.v",
    "messages",
    "m",
    "7",
    "10**6",
    "'ab'",
    "[1, 'c']",
    "{'k': x}",
    "none",
    "range(99999)",
    "loop",
    "dict",
]
JOINERS = [" + ", " * ", " ~ ", " % ", " ** ", " // ", " in ", " and ", ", ", "[", "](", "].", "."]
CALLS = [
    " | tojson(indent=2)", " | join('ab')", " | replace('', x)", " | list", " | batch(9)", " | string",
    " | map('string')",
    " | sum", " | indent(70)", " | format(x)", " | center(99999)", ".format(x)", ".join(x)", ".items()", ".split('a')",
    ".__class__", "[::-1]", ".zfill(999999)", " | length", " | sort", " | groupby('a')", " | dictsort", " | pprint",
]  # fmt: skip
EXPRESSION = st.lists(st.sampled_from(ATOMS + JOINERS + CALLS), min_size=1, max_size=6).map("".join)
STATEMENT = st.one_of(
    EXPRESSION.map(lambda e: f"{{{{ {e} }}}}"),
    EXPRESSION.map(lambda e: f"{{% set ns.v = {e} %}}"),
    EXPRESSION.map(lambda e: f"{{% for m in {e} %}}"),
    EXPRESSION.map(lambda e: f"{{% if {e} %}}"),
    st.sampled_from(["{% endfor %}", "{% endif %}", "{% else %}", "{% macro f(x) %}", "{% endmacro %}", "{{ f(x) }}"]),
    st.sampled_from(
        ["{% generation %}", "{% endgeneration %}", "{% break %}", "{% continue %}", "text", "{#", "#}", "{{"]
    ),
)


@given(parts=st.lists(STATEMENT, max_size=8))
@settings(max_examples=400, deadline=None)
def test_random_templates_end_well(parts: list[str]) -> None:
    start = time.monotonic()
    try:
        text = Template("{% set ns = namespace(v='q') %}" + "".join(parts), seconds=0.5).render(
            {"messages": [{"role": "user", "content": "hi"}], "x": "value"}
        )
    except (TemplateError, UnsupportedFeature) as error:
        text = str(error)
        assert text
    assert isinstance(text, str)
    assert time.monotonic() - start < 10
