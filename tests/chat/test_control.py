"""Finding control tokens in a user's text."""

from __future__ import annotations

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from arriero.chat.renderers.control import ControlText


@given(tokens=st.lists(st.text("<ab>", min_size=1, max_size=4), max_size=4), text=st.text("<ab>c", max_size=30))
@settings(max_examples=300, deadline=None)
def test_spans_equal_those_of_a_pattern_of_the_longest_tokens(tokens: list[str], text: str) -> None:
    alternatives = "|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True))
    expected = [match.span() for match in re.finditer(alternatives, text)] if tokens else []
    assert ControlText(tokens).spans(text) == expected


def test_a_long_text_with_many_tokens_is_searched_quickly() -> None:
    control = ControlText(f"<unused{number}>" for number in range(6000))
    text = "if a < b and c > d: <unused77>\n" * 20_000
    assert len(control.spans(text)) == 20_000
