"""Requests of all /v1 routes: every field has its rule, nulls are nothing."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import types as anthropic
from anthropic.types import beta
from openai.types import chat, responses
from openai.types.chat import completion_create_params as chat_params
from openai.types.completion_create_params import CompletionCreateParamsBase
from openai.types.embedding_create_params import EmbeddingCreateParams
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from openai.types.responses.response_input_param import ResponseInputItemParam

from arriero.server.compat import anthropic_request, openai_request, responses_request
from arriero.server.compat.fields import FieldRules
from arriero.server.schemas import anthropic as anthropic_wire
from arriero.server.schemas import openai as openai_wire
from arriero.server.schemas import responses as responses_wire
from tests.helpers.echo_runner import say
from tests.helpers.live_server import LiveServer
from tests.helpers.v1 import NOTE, SCHEMA, put_agent

USER = [{"role": "user", "content": say("Hello.")}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "tiny", "messages": USER},
    "/v1/completions": {"model": "tiny", "prompt": say("Hello.")},
    "/v1/responses": {"model": "tiny", "input": say("Hello.")},
    "/v1/messages": {"model": "tiny", "messages": USER, "max_tokens": 50},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": USER},
}
"""The least that each route takes."""

RULES: list[tuple[FieldRules[Any], list[type]]] = [
    (openai_wire.CHAT, [chat_params.CompletionCreateParamsStreaming]),
    (openai_wire.COMPLETION, [CompletionCreateParamsBase]),
    (responses_wire.RESPONSES, [ResponseCreateParamsBase]),
    (
        anthropic_wire.MESSAGES,
        [anthropic.message_create_params.MessageCreateParamsBase, beta.message_create_params.MessageCreateParamsBase],
    ),
    (
        anthropic_wire.COUNT,
        [
            anthropic.message_count_tokens_params.MessageCountTokensParams,
            beta.message_count_tokens_params.MessageCountTokensParams,
        ],
    ),
]
ALL_RULES = [*RULES, (openai_wire.EMBEDDINGS, [EmbeddingCreateParams])]
REFUSED = [(rules.route, name) for rules, _ in RULES for name in rules.refused]
IGNORED = [(rules.route, name) for rules, _ in RULES for name in rules.ignored if "." not in name]


def text_of(path: str, reply: dict[str, Any]) -> Any:
    if path == "/v1/chat/completions":
        return reply["choices"][0]["message"]["content"]
    if path == "/v1/completions":
        return reply["choices"][0]["text"]
    if path == "/v1/responses":
        return next(item["content"][0]["text"] for item in reply["output"] if item["type"] == "message")
    return reply["content"][0]["text"] if "content" in reply else reply["input_tokens"]


def error_of(reply: httpx.Response) -> str:
    assert reply.status_code == 400, reply.text
    return reply.json()["error"]["message"]


def answer(http: httpx.Client, path: str, **fields: Any) -> Any:
    reply = http.post(path, json=BODIES[path] | fields)
    assert reply.status_code == 200, reply.text
    return text_of(path, reply.json())


def literals(union: Any) -> set[str]:
    """The `type` values of the members of a union of dictionaries."""
    found: set[str] = set()
    for member in typing.get_args(union):
        kind = typing.get_type_hints(member).get("type") if hasattr(member, "__annotations__") else None
        while kind is not None and typing.get_origin(kind) is not typing.Literal:
            kind = next((arg for arg in typing.get_args(kind) if arg is not type(None)), None)
        found |= set(typing.get_args(kind))
    return found


# --- every field of the clients' own types


@pytest.mark.parametrize(("rules", "types"), ALL_RULES, ids=[rules.route for rules, _ in ALL_RULES])
def test_every_field_of_the_clients_types_has_a_rule(rules: FieldRules[Any], types: list[type]) -> None:
    fields = {name for kind in types for name in typing.get_type_hints(kind)}
    assert len(fields) > 4
    known = rules.honoured | set(rules.ignored) | set(rules.refused)
    assert fields - known == set()
    assert not rules.honoured & (set(rules.ignored) | set(rules.refused))


def test_fields_inside_of_honoured_objects_have_rules_too() -> None:
    inner = [
        (openai_wire.CHAT, "stream_options", openai_wire.StreamOptions, chat.ChatCompletionStreamOptionsParam),
        (responses_wire.RESPONSES, "text", responses_wire.Text, responses.ResponseTextConfigParam),
        (anthropic_wire.MESSAGES, "output_config", anthropic_wire.OutputConfig, beta.BetaOutputConfigParam),
        (anthropic_wire.MESSAGES, "thinking", anthropic_wire.Thinking, anthropic.ThinkingConfigEnabledParam),
        (anthropic_wire.MESSAGES, "tool_choice", anthropic_wire.ToolChoice, anthropic.ToolChoiceToolParam),
    ]
    for rules, name, kind, theirs in inner:
        for field in typing.get_type_hints(theirs):
            assert field in kind.__struct_fields__ or f"{name}.{field}" in rules.ignored, (name, field)


@pytest.mark.parametrize(("path", "name"), REFUSED)
def test_a_refused_field_is_named_in_a_400(http: httpx.Client, path: str, name: str) -> None:
    assert f"{name} is not supported" in error_of(http.post(path, json=BODIES[path] | {name: [{"some": "thing"}]}))


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        (rules.route, name, value)
        for rules, _ in RULES
        for name, refusal in rules.refused.items()
        for value in refusal.neutral
    ],
)
def test_a_refused_field_that_asks_for_nothing_is_fine(http: httpx.Client, path: str, name: str, value: Any) -> None:
    assert answer(http, path, **{name: value}) == answer(http, path)


@pytest.mark.parametrize("path", sorted({path for path, _ in IGNORED}))
def test_ignored_fields_change_nothing_whatever_they_hold(http: httpx.Client, path: str) -> None:
    for value in ("text", {"some": ["thing"]}, 5, True):
        fields = {name: value for route, name in IGNORED if route == path}
        assert answer(http, path, **fields) == answer(http, path)


@pytest.mark.parametrize(("rules", "_types"), RULES, ids=[rules.route for rules, _ in RULES])
def test_nulls_are_absent_fields(http: httpx.Client, rules: FieldRules[Any], _types: list[type]) -> None:
    body = BODIES[rules.route]
    names = (rules.honoured | set(rules.ignored) | set(rules.refused)) - set(body)
    nulls = {name: None for name in names if "." not in name}
    assert answer(http, rules.route, **nulls) == answer(http, rules.route)


@pytest.mark.parametrize("path", BODIES)
def test_a_missing_or_null_model_is_said_to_be_required(http: httpx.Client, path: str) -> None:
    for body in ({**BODIES[path], "model": None}, {key: BODIES[path][key] for key in BODIES[path] if key != "model"}):
        assert error_of(http.post(path, json=body)) == "model is required"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("value", [0, -3, 1.5, "x", [None], {"type": None}, True, [{"a": 1}]])
def test_no_value_of_any_field_breaks_the_server(http: httpx.Client, path: str, value: Any) -> None:
    rules = next(rules for rules, _ in RULES if rules.route == path)
    for name in sorted(rules.honoured):
        reply = http.post(path, json=BODIES[path] | {name: value, "stream": False})
        assert reply.status_code in (200, 400, 404), (name, value, reply.text)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("value", [0, -3, "x", None, [None], {}, {"type": None}, {"type": []}, [[]], {"content": {}}])
def test_no_message_breaks_the_server(http: httpx.Client, path: str, value: Any) -> None:
    name = {"/v1/responses": "input", "/v1/completions": "prompt"}.get(path, "messages")
    odd = [value, {"role": "user", "content": value}, {"role": "assistant", "content": [value]}]
    odd += [{"role": "user", "content": [value]}, {"role": "assistant", "tool_calls": [value]}, {"type": value}]
    odd += [
        {"role": "user", "content": [{"type": kind, "text": value, "image_url": value, "source": value}]}
        for kind in ("text", "image_url", "image", "input_image", "tool_result", "document")
    ]
    for message in odd:
        reply = http.post(path, json=BODIES[path] | {name: [message, *USER]})
        assert reply.status_code in (200, 400), (message, reply.text)


def test_a_compressed_body_is_refused_by_name(http: httpx.Client) -> None:
    reply = http.post("/v1/responses", content=b"\x28\xb5\x2f\xfd", headers={"Content-Encoding": "zstd"})
    assert "zstd" in error_of(reply)


def test_an_unknown_format_of_a_response_is_refused(http: httpx.Client) -> None:
    body = BODIES["/v1/responses"] | {"text": {"format": {"type": "yaml"}}}
    assert "text.format.type" in error_of(http.post("/v1/responses", json=body))


# --- every kind of part, item and tool of the clients' own types


def test_every_kind_of_chat_part_is_known() -> None:
    parts = openai_request.PARTS
    kinds = literals(chat.ChatCompletionContentPartParam)
    assert {"text", "image_url"} <= kinds
    assert kinds <= {*parts.texts, *parts.images, *parts.ignored, *parts.refused}


def test_every_kind_of_item_is_known() -> None:
    kinds = literals(ResponseInputItemParam)
    assert len(kinds) > 20
    assert kinds <= responses_request.KNOWN


def test_every_kind_of_block_is_known() -> None:
    blocks = anthropic_request.BLOCKS
    known = {*blocks.texts, *blocks.images, *blocks.ignored, *blocks.refused, *anthropic_request.OWN}
    for union in (anthropic.ContentBlockParam, beta.BetaContentBlockParam):
        kinds = literals(union)
        assert len(kinds) > 10
        assert kinds <= known


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_tools_of_other_kinds_are_left_out(server: LiveServer, http: httpx.Client, path: str) -> None:
    kinds = {
        "/v1/chat/completions": literals(chat.ChatCompletionToolUnionParam),
        "/v1/responses": literals(responses.ToolParam),
        "/v1/messages": literals(beta.BetaToolUnionParam),
    }[path] - {"function", "namespace"}
    if path == "/v1/messages":
        kinds -= {"custom"}
    tools: list[dict[str, Any]] = [{"type": kind, "name": "other"} for kind in sorted(kinds)]
    assert tools
    function = {
        "/v1/chat/completions": NOTE,
        "/v1/responses": {"type": "function", "name": "save_note", "parameters": SCHEMA},
        "/v1/messages": {"name": "save_note", "input_schema": SCHEMA},
    }[path]
    model = put_agent(server)

    def tokens(*offered: dict[str, Any]) -> int:
        usage = http.post(path, json=BODIES[path] | {"model": model, "tools": offered}).json()["usage"]
        return usage["prompt_tokens"] if "prompt_tokens" in usage else usage["input_tokens"]

    assert tokens(*tools, function) == tokens(function)
    assert tokens(*tools) < tokens(function)


def test_the_same_question_is_answered_alike_on_every_route(http: httpx.Client) -> None:
    native = http.post("/api/chat", json={**BODIES["/v1/chat/completions"], "stream": False}).json()
    found = {
        answer(http, path) for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
    }
    assert found == {native["message"]["content"]}
    assert answer(http, "/v1/messages/count_tokens") == native["prompt_eval_count"]


def test_the_page_of_these_apis_names_every_field() -> None:
    page = (Path(__file__).parents[2] / "docs" / "v1.md").read_text("utf-8")
    for rules, _ in ALL_RULES:
        for name in {*rules.honoured, *rules.ignored, *rules.refused}:
            assert f"`{name}" in page, (rules.route, name)
