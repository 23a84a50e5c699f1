"""`format` over the native API, through a real runner with a small random model: every reply fits."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import numpy as np
import pytest

from arriero.create.create import create
from arriero.create.request import CreateRequest
from tests.helpers.checkpoint_folder import tensors, upload, write_folder
from tests.helpers.live_server import LiveServer, live_server
from tests.helpers.stored_model import CHATML, SPECIAL, byte_tokenizer

THINKING = CHATML + "{% if enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}"
SCHEMA = {
    "type": "object",
    "properties": {"score": {"type": "integer", "minimum": 0, "maximum": 10}, "grade": {"enum": ["a", "b"]}},
    "required": ["score", "grade"],
    "additionalProperties": False,
}
HOT = {"temperature": 1.5, "num_predict": 2000, "seed": 3}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("format")
    special = (*SPECIAL, "<think>", "</think>")
    held = tensors()
    table = held["model.embed_tokens.weight"]
    held["model.embed_tokens.weight"] = np.concatenate([table, table[:2]])
    for name, template in (("plain", CHATML), ("thinker", THINKING)):
        config = {"vocab_size": 261, "max_position_embeddings": 8192}
        write_folder(folder / name, {"model.safetensors": held}, config=config)
        (folder / name / "tokenizer.json").write_text(byte_tokenizer(special).to_str())
        (folder / name / "chat_template.jinja").write_text(template)
    with live_server(folder, [sys.executable, "-m", "arriero.runner"]) as running:
        for name in ("plain", "thinker"):
            files = upload(running.store, folder / name)
            create(running.store, CreateRequest(model=name, files=files), lambda status: None)
        yield running


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False, verify=False) as client:
        yield client


def chat(http: httpx.Client, form: Any, model: str = "plain", **fields: Any) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "format": form, "stream": False}
    return http.post("/api/chat", json=body | {"options": HOT} | fields)


def test_a_chat_reply_fits_its_schema(http: httpx.Client) -> None:
    for seed in range(5):
        reply = chat(http, SCHEMA, options=HOT | {"seed": seed}).raise_for_status().json()
        assert reply["done_reason"] == "stop"
        jsonschema.validate(json.loads(reply["message"]["content"]), SCHEMA)


def test_a_streamed_generate_reply_fits_its_schema_with_log_probabilities(http: httpx.Client) -> None:
    body = {"model": "plain", "prompt": "Hi", "format": SCHEMA, "options": HOT, "logprobs": True, "top_logprobs": 2}
    lines = [json.loads(line) for line in http.post("/api/generate", json=body).raise_for_status().text.splitlines()]
    text = "".join(line["response"] for line in lines)
    jsonschema.validate(json.loads(text), SCHEMA)
    chosen = [entry for line in lines for entry in line.get("logprobs", [])]
    assert b"".join(bytes(entry["bytes"]) for entry in chosen).decode() == text


def test_a_thinker_thinks_freely_and_then_answers_in_its_schema(http: httpx.Client) -> None:
    for seed in range(3):
        reply = chat(http, SCHEMA, "thinker", options=HOT | {"seed": seed}).raise_for_status().json()
        assert reply["done_reason"] == "stop"
        assert reply["message"]["thinking"]
        jsonschema.validate(json.loads(reply["message"]["content"]), SCHEMA)


def test_without_thinking_a_thinker_answers_at_once(http: httpx.Client) -> None:
    message = chat(http, SCHEMA, "thinker", think=False).raise_for_status().json()["message"]
    assert "thinking" not in message
    jsonschema.validate(json.loads(message["content"]), SCHEMA)


def test_json_mode_gives_an_object(http: httpx.Client) -> None:
    reply = chat(http, "json", options=HOT | {"num_predict": 3000, "temperature": 0.7, "seed": 11}).json()
    assert reply["message"]["content"].startswith("{")
    if reply["done_reason"] == "stop":
        assert isinstance(json.loads(reply["message"]["content"]), dict)


def v1(http: httpx.Client, path: str, **fields: Any) -> httpx.Response:
    body: dict[str, Any] = {"model": "plain", "temperature": 1.5, "seed": 5}
    return http.post(path, json=body | fields)


def test_a_response_format_of_openais_chat_is_honoured(http: httpx.Client) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "grade", "strict": True, "schema": SCHEMA}}
    asked = [{"role": "user", "content": "Hi"}]
    reply = v1(http, "/v1/chat/completions", messages=asked, response_format=form).raise_for_status().json()
    jsonschema.validate(json.loads(reply["choices"][0]["message"]["content"]), SCHEMA)


def test_a_text_format_of_openais_responses_is_honoured(http: httpx.Client) -> None:
    form = {"format": {"type": "json_schema", "name": "grade", "schema": SCHEMA}}
    reply = v1(http, "/v1/responses", input="Hi", text=form).raise_for_status().json()
    text = next(item for item in reply["output"] if item["type"] == "message")["content"][0]["text"]
    jsonschema.validate(json.loads(text), SCHEMA)


def test_an_output_format_of_anthropics_messages_is_honoured(http: httpx.Client) -> None:
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    asked = [{"role": "user", "content": "Hi"}]
    reply = v1(http, "/v1/messages", messages=asked, max_tokens=2000, output_config=form).raise_for_status().json()
    jsonschema.validate(json.loads(reply["content"][0]["text"]), SCHEMA)


def test_an_unsupported_keyword_of_a_response_format_is_named(http: httpx.Client) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
    asked = [{"role": "user", "content": "Hi"}]
    reply = v1(http, "/v1/chat/completions", messages=asked, response_format=form)
    assert reply.status_code == 400
    assert "response_format" in reply.text
    assert "'not'" in reply.text


@pytest.mark.parametrize("form", [None, ""])
def test_an_empty_format_is_none(http: httpx.Client, form: Any) -> None:
    assert chat(http, form, options={"num_predict": 3}).status_code == 200


def test_a_regular_expression_and_a_grammar_are_formats_too(http: httpx.Client) -> None:
    assert chat(http, {"regex": "[ab]{4}"}).json()["message"]["content"].strip("ab") == ""
    reply = chat(http, {"lark": 'start: "x=" DIGIT\nDIGIT: /[0-9]/'}).json()
    assert reply["message"]["content"][:2] == "x="


@pytest.mark.parametrize(
    ("form", "named"),
    [
        ("yaml_please", 'expected "json" or a valid JSON Schema object'),
        (True, 'expected "json" or a valid JSON Schema object'),
        ([1], 'expected "json" or a valid JSON Schema object'),
        ({"type": "object", "properties": {"a": {"not": {}}}}, "'not'"),
        ({"if": {}, "then": {}}, "'if', 'then'"),
        ({"type": "strin"}, "strin"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"regex": "a("}, "unclosed group"),
        ({"lark": "start: foo"}, "foo"),
    ],
)
def test_what_can_not_be_honoured_is_a_400_that_says_what(http: httpx.Client, form: Any, named: str) -> None:
    for stream in (False, True):
        reply = chat(http, form, stream=stream)
        assert reply.status_code == 400
        assert "format" in reply.json()["error"]
        assert named in reply.json()["error"]
