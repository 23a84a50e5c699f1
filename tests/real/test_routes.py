"""Real models say the same through every API, and count their tokens alike."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from arriero.create.create import create
from arriero.create.request import CreateRequest
from tests.helpers.live_server import LiveServer, live_server
from tools.models import fetch

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

ASKED = [
    {"role": "system", "content": "You answer in one short sentence."},
    {"role": "user", "content": "What is the capital of France?"},
]
OPTIONS = {"temperature": 0, "num_predict": 24}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("routes"), [sys.executable, "-m", "arriero.runner"]) as running:
        for name in ("smollm2", "gemma3"):
            path = Path(fetch(name))
            digest = running.store.blobs.ingest([path.read_bytes()]).digest
            create(running.store, CreateRequest(model=name, files={path.name: digest}), lambda status: None)
        yield running


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=300, trust_env=False) as client:
        yield client


def post(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    found: dict[str, Any] = http.post(path, json=body).raise_for_status().json()
    return found


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_the_answer_is_the_same_through_every_route(http: httpx.Client, model: str) -> None:
    body: dict[str, Any] = {"model": model, "options": OPTIONS}
    native = post(http, "/api/chat", **body, messages=ASKED, stream=False)
    text = native["message"]["content"]
    assert "Paris" in text or model == "gemma3"  # which was never taught to answer
    chat = post(http, "/v1/chat/completions", **body, messages=ASKED)
    response = post(http, "/v1/responses", **body, instructions=ASKED[0]["content"], input=ASKED[1]["content"])
    message = post(
        http, "/v1/messages", **body, system=ASKED[0]["content"], messages=ASKED[1:], max_tokens=OPTIONS["num_predict"]
    )
    assert chat["choices"][0]["message"]["content"] == text
    assert response["output"][0]["content"][0]["text"] == text
    assert message["content"][0]["text"] == text
    counted = post(http, "/v1/messages/count_tokens", model=model, system=ASKED[0]["content"], messages=ASKED[1:])[
        "input_tokens"
    ]
    usage = message["usage"]
    assert counted == native["prompt_eval_count"]
    assert counted == chat["usage"]["prompt_tokens"] == response["usage"]["input_tokens"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert native["eval_count"] == chat["usage"]["completion_tokens"] == usage["output_tokens"]
    # The later requests found the prompt of the first one.
    assert chat["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert usage["cache_read_input_tokens"] > 0


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_a_schema_holds_on_every_route(http: httpx.Client, model: str) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "sure": {"type": "boolean"}},
        "required": ["city", "sure"],
        "additionalProperties": False,
    }
    body: dict[str, Any] = {"model": model, "options": {"temperature": 0, "num_predict": 60}}
    form = {"type": "json_schema", "schema": schema, "name": "answer"}
    chat = post(
        http,
        "/v1/chat/completions",
        **body,
        messages=ASKED,
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
    )["choices"][0]["message"]["content"]
    response = post(http, "/v1/responses", **body, input="What is the capital of France?", text={"format": form})
    message = post(http, "/v1/messages", **body, messages=ASKED[1:], max_tokens=60, output_config={"format": form})
    for text in (chat, response["output"][0]["content"][0]["text"], message["content"][0]["text"]):
        assert set(json.loads(text)) == {"city", "sure"}
