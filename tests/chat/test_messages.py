"""The neutral conversation."""

from __future__ import annotations

from typing import Any

import pytest

from arriero.chat.messages import Tool, ToolCall


@pytest.mark.parametrize(
    ("arguments", "mapping"),
    [
        ({"b": 1, "a": 2}, {"b": 1, "a": 2}),
        ('{"b": 1, "a": 2}', {"b": 1, "a": 2}),
        ("", {}),
        (" \n", {}),
        ("null", {}),
        ("{}", {}),
        ("[1]", None),
        ("3", None),
        ("not json", None),
        ('{"a": ', None),
        ('{"a": ' + "[" * 200_000 + "]" * 200_000 + "}", None),
    ],
)
def test_arguments_are_read_as_an_object_in_their_order(
    arguments: dict[str, Any] | str, mapping: dict[str, Any] | None
) -> None:
    found = ToolCall(name="f", arguments=arguments).mapping()
    assert found == mapping
    assert found is None or mapping is None or list(found) == list(mapping)


def test_a_clients_own_argument_text_is_kept() -> None:
    assert ToolCall(name="f", arguments='{"a":1,  "b":2}').text() == '{"a":1,  "b":2}'


def test_an_object_is_written_with_its_own_letters() -> None:
    assert ToolCall(name="f", arguments={"město": "Brno"}).text() == '{"město": "Brno"}'


@pytest.mark.parametrize(
    ("definition", "name"),
    [({"type": "function", "function": {"name": "f"}}, "f"), ({"type": "web_search"}, ""), ({"function": 3}, "")],
)
def test_a_tool_is_named_by_its_function(definition: dict[str, Any], name: str) -> None:
    assert Tool(definition).name == name
