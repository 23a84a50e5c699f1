"""What goes on behind /v1: the parameters that a runner gets, silence, clients that leave, images."""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from arriero.server.compat import sse
from tests.api.test_images import FIRST
from tests.helpers.echo_runner import echo_command, say
from tests.helpers.live_server import LiveServer, live_server
from tests.helpers.scripted_runner import Script, received
from tests.helpers.seeing_server import OPTIONS, Seeing
from tests.helpers.stored_model import put_model

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, Path]]:
    """A server, and the file that its runner notes its messages in."""
    folder = tmp_path_factory.mktemp("logged")
    log = folder / "log"
    with live_server(folder, echo_command(folder, Script(log=str(log)))) as running:
        put_model(
            running.store, "cool", params={"temperature": 0.25, "top_p": 0.5, "stop": ["STOP"], "num_predict": 99}
        )
        yield running, log


def body_of(path: str, text: str, **fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "cool"} | fields
    if path == "/v1/completions":
        return body | {"prompt": text}
    if path == "/v1/responses":
        return body | {"input": text}
    return body | {"messages": [{"role": "user", "content": text}]} | ({"max_tokens": 500} if "mess" in path else {})


def submitted(logged: tuple[LiveServer, Path], path: str, **fields: Any) -> dict[str, Any]:
    """What a runner got of a request."""
    server, log = logged
    with httpx.Client(base_url=server.url, timeout=20, trust_env=False, verify=False) as http:
        reply = http.post(path, json=body_of(path, say("x"), **fields))
        assert reply.status_code == 200, reply.text
    return [message for message in received(log) if message["type"] == "submit"][-1]


@pytest.mark.parametrize("path", PATHS)
def test_the_models_own_parameters_hold_unless_a_request_has_its_own(
    logged: tuple[LiveServer, Path], path: str
) -> None:
    found = submitted(logged, path)
    assert (found["sampling"]["temperature"], found["sampling"]["top_p"]) == (0.25, 0.5)
    assert found["max_tokens"] == (500 if path == "/v1/messages" else 99)
    found = submitted(logged, path, temperature=1, options={"temperature": 0.5, "top_k": 7}, min_p=0.125, seed=11)
    assert found["sampling"]["temperature"] == 1
    assert [found["sampling"][name] for name in ("top_k", "min_p", "seed")] == [7, 0.125, 11]


@pytest.mark.parametrize("path", PATHS[:2])
def test_penalties_reach_the_runner(logged: tuple[LiveServer, Path], path: str) -> None:
    found = submitted(logged, path, frequency_penalty=0.5, presence_penalty=-0.5, logit_bias={})
    assert [found["sampling"][name] for name in ("frequency_penalty", "presence_penalty")] == [0.5, -0.5]


@pytest.mark.parametrize("path", PATHS)
def test_silence_is_broken_by_signs_of_life(
    logged: tuple[LiveServer, Path], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "QUIET_SECONDS", 0.03)
    with httpx.Client(base_url=logged[0].url, timeout=20, trust_env=False, verify=False) as http:
        text = http.post(path, json=body_of(path, say("ab", delay=0.1), stream=True)).text
    first = text.partition("\n\n")[0]
    if path == "/v1/messages":
        assert first.startswith("event: message_start\n")
        assert re.search(r'"input_tokens":[1-9]', first)
        assert text.count('event: ping\ndata: {"type":"ping"}\n\n') >= 3
        assert text.count("event: message_start") == 1
    elif path == "/v1/responses":
        assert first.startswith("event: response.created\n")
        assert text.count("event: response.created") == 1
        assert text.count(": still working\n\n") >= 2
    else:
        assert first == ": still working"
    assert text.count("error") == text.count('"error":null')


@pytest.mark.parametrize("path", PATHS)
def test_a_client_that_leaves_ends_its_row(logged: tuple[LiveServer, Path], path: str) -> None:
    server = logged[0]
    body = body_of(path, say("abc", endless=True, delay=0.02), stream=True)
    with (
        httpx.Client(base_url=server.url, timeout=20, trust_env=False, verify=False) as http,
        http.stream("POST", path, json=body) as reply,
    ):
        next(reply.iter_bytes())
        assert server.rows() == 1
    deadline = time.monotonic() + 5
    while server.rows() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert server.rows() == 0


def test_every_reply_names_its_request(logged: tuple[LiveServer, Path], caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level("INFO", "arriero.server.access"),
        httpx.Client(base_url=logged[0].url, trust_env=False, verify=False) as http,
    ):
        found = http.get("/v1/models").headers
        other = http.get("/api/version").headers
    assert found["x-request-id"] == found["request-id"] != other["x-request-id"]
    assert any(found["request-id"] in record.getMessage() for record in caplog.records)


def test_an_image_is_seen_on_every_route(seeing: Seeing) -> None:
    data = base64.b64encode(FIRST).decode()
    url = f"data:image/png;base64,{data}"
    options = {"model": "seeing", "options": OPTIONS}
    native = seeing.http.post(
        "/api/chat",
        json={**options, "stream": False, "messages": [{"role": "user", "content": "what?", "images": [data]}]},
    ).json()["message"]["content"]
    text = {"type": "text", "text": "what?"}
    parts = [{"type": "image_url", "image_url": {"url": url}}, text]
    chat = seeing.http.post(
        "/v1/chat/completions", json={**options, "messages": [{"role": "user", "content": parts}]}
    ).json()
    blocks = [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}, text]
    message = seeing.http.post(
        "/v1/messages", json={**options, "max_tokens": 12, "messages": [{"role": "user", "content": blocks}]}
    ).json()
    items = [{"role": "user", "content": [{"type": "input_image", "image_url": url}, text | {"type": "input_text"}]}]
    response = seeing.http.post("/v1/responses", json={**options, "input": items}).json()
    assert chat["choices"][0]["message"]["content"] == native
    assert message["content"][0]["text"] == native
    assert response["output"][0]["content"][0]["text"] == native
    refused = seeing.http.post(
        "/v1/messages",
        json={**options, "model": "blind", "max_tokens": 12, "messages": [{"role": "user", "content": blocks}]},
    )
    assert refused.status_code == 400
    assert "does not support images" in refused.json()["error"]["message"]
