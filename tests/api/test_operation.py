"""What whoever runs a server needs: numbers, keys, request ids, limits, and a clean end."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from signal import SIGINT, SIGTERM
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from arriero.cli.client import ApiError, Client
from arriero.server.app import exposure
from arriero.settings import Settings
from tests.helpers.echo_runner import echo_command, say
from tests.helpers.exposition import read, value
from tests.helpers.live_server import LiveServer, live_server
from tests.helpers.stored_model import put_model
from tests.helpers.v1 import anthropic_options, openai_options

KEY = "correct-horse"


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server that wants a key and takes small bodies."""
    folder = tmp_path_factory.mktemp("locked")
    with live_server(folder, echo_command(folder), api_keys=(KEY, "old-one"), max_body=4096) as running:
        put_model(running.store, "tiny")
        yield running


def plain(server: LiveServer, **headers: str) -> httpx.Client:
    return httpx.Client(base_url=server.url, headers=headers, timeout=20, trust_env=False, verify=False)


def asked(text: str, **manner: object) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": say(text, **manner)}]}


# --- numbers


def test_a_reply_shows_in_the_numbers(locked: LiveServer) -> None:
    with plain(locked, authorization=f"Bearer {KEY}") as http:
        before = read(http.get("/metrics").text)
        http.post(
            "/api/chat", json=asked("abc", delay=0.001, cached_tokens=5, rounds=2) | {"stream": False}
        ).raise_for_status()
        http.post("/api/chat", json=asked("abcd") | {"options": {"num_predict": 2}}).raise_for_status()
        http.post("/api/chat", json=asked("abc", fail_after=1) | {"stream": False})
        http.get("/api/nothing")
        reply = http.get("/metrics")
    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    after = read(reply.text)
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text("utf-8")
    families = [
        line.split()[2].removeprefix("arriero_") for line in reply.text.splitlines() if line.startswith("# TYPE")
    ]
    assert [name for name in families if f"`{name}`" not in page] == []

    def grown(name: str, **labels: str) -> float:
        return value(after, f"arriero_{name}", **labels) - value(before, f"arriero_{name}", **labels)

    model = {"model": "tiny:latest"}
    assert grown("requests_total", method="POST", route="/api/chat", status="200") == 2
    assert grown("requests_total", method="POST", route="/api/chat", status="500") == 1
    assert grown("requests_total", method="GET", route="other", status="404") == 1
    assert grown("request_seconds_count", route="/api/chat") == 3
    assert grown("replies_total", **model, reason="stop") == 1
    assert grown("replies_total", **model, reason="length") == 1
    assert grown("replies_total", **model, reason="error") == 1
    assert grown("generated_tokens_total", **model) == 3 + 2 + 1
    assert grown("cached_tokens_total", **model) == 5
    assert grown("prompt_tokens_total", **model) > 40
    assert grown("time_to_first_token_seconds_count", **model) == 3
    assert grown("time_per_token_seconds_count", **model) == 2 + 1
    assert grown("speculation_rounds_total", **model, draft="lookup") == 2
    assert grown("speculation_drafted_tokens_total", **model, draft="lookup") == 6
    assert grown("speculation_accepted_tokens_total", **model, draft="lookup") == 4
    assert value(after, "arriero_models", state="ready") == 1
    assert value(after, "arriero_model_weight_bytes", **model) == 1000
    assert value(after, "arriero_model_reserved_bytes", **model) == value(after, "arriero_reserved_bytes") > 1000
    assert value(after, "arriero_runner_memory_bytes", **model) == 1000
    assert value(after, "arriero_requests_in_flight") == 1  # the one that asks
    assert value(after, "arriero_queue_length") == 0


def test_a_client_that_leaves_is_counted_as_one(locked: LiveServer) -> None:
    with plain(locked, authorization=f"Bearer {KEY}") as http:
        before = value(read(http.get("/metrics").text), "arriero_replies_total", model="tiny:latest", reason="left")
        with http.stream("POST", "/api/chat", json=asked("ab", endless=True, delay=0.005)) as reply:
            next(reply.iter_lines())
        deadline = time.monotonic() + 5
        left = before
        while left == before and time.monotonic() < deadline:
            left = value(read(http.get("/metrics").text), "arriero_replies_total", model="tiny:latest", reason="left")
    assert left == before + 1


# --- keys


def test_the_real_clients_are_let_in_with_a_key(locked: LiveServer) -> None:
    question: Any = asked("in")["messages"]
    with openai.OpenAI(**openai_options(locked) | {"api_key": KEY}) as client:
        assert client.chat.completions.create(model="tiny", messages=question).choices[0].message.content == "in"
    with anthropic.Anthropic(**anthropic_options(locked) | {"api_key": KEY}) as claude:
        message = claude.messages.create(model="tiny", max_tokens=9, messages=question)
        assert message.content[0].text == "in"  # type: ignore[union-attr]
    headers = {"Authorization": f"Bearer {KEY}"}
    with ollama.Client(host=locked.url, headers=headers, verify=False) as native:
        assert native.chat("tiny", question).message.content == "in"


def test_the_real_clients_say_that_a_key_is_wrong(locked: LiveServer) -> None:
    question: Any = asked("in")["messages"]
    with openai.OpenAI(**openai_options(locked)) as client:
        with pytest.raises(openai.AuthenticationError, match="wants an API key") as caught:
            client.chat.completions.create(model="tiny", messages=question)
        assert caught.value.code == "invalid_api_key"
    with (
        anthropic.Anthropic(**anthropic_options(locked)) as claude,
        pytest.raises(anthropic.AuthenticationError, match="is not the server's"),
    ):
        claude.messages.create(model="tiny", max_tokens=9, messages=question)
    with (
        ollama.Client(host=locked.url, verify=False) as native,
        pytest.raises(ollama.ResponseError, match="wants an API key"),
    ):
        native.chat("tiny", question)


def test_the_command_lines_client_sends_the_first_key(locked: LiveServer) -> None:
    environ = {"ARRIERO_HOST": f"127.0.0.1:{locked.port}", "ARRIERO_API_KEY": f" {KEY}, other"}
    client = Client.from_settings(Settings.from_environ(environ))
    assert [model["name"] for model in client.call("GET", "/api/tags")["models"]] == ["tiny:latest"]
    keyless = Client.from_settings(Settings.from_environ(environ | {"ARRIERO_API_KEY": ""}))
    assert keyless.is_up()
    with pytest.raises(ApiError, match="ARRIERO_API_KEY"):
        keyless.call("GET", "/api/tags")


def test_a_page_may_ask_before_it_sends_its_key(locked: LiveServer) -> None:
    headers = {"Origin": "http://localhost:3000", "Access-Control-Request-Method": "POST"}
    with plain(locked, **headers) as http:
        assert http.options("/api/chat").status_code == 204
        refused = http.get("/api/tags")
    # The page must be able to read why.
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "http://localhost:3000")


def wait_for_line(caplog: pytest.LogCaptureFixture, text: str) -> None:
    """The log's line is written when a reply is through, which its client may see first."""
    deadline = time.monotonic() + 10
    while text not in caplog.text:
        assert time.monotonic() < deadline, caplog.text
        time.sleep(0.01)


def test_a_key_never_reaches_the_log(locked: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", "arriero"), plain(locked, authorization=f"Bearer {KEY}") as http:
        http.get("/api/tags", headers={"x-api-key": "almost-right"})
        http.get("/api/tags", headers={"authorization": "Bearer almost-right"})
        wait_for_line(caplog, "GET /api/tags 401")
    assert KEY not in caplog.text
    assert "almost-right" not in caplog.text
    assert KEY not in repr(locked.settings)


# --- request ids


def test_a_request_keeps_the_id_that_it_came_with(locked: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "arriero.server.access"), plain(locked, **{"x-api-key": KEY}) as http:
        reply = http.post("/v1/messages", json={"model": "none"}, headers={"x-request-id": "trace:7/a"})
        wait_for_line(caplog, " trace:7/a\n")
    assert reply.headers["x-request-id"] == reply.headers["request-id"] == reply.json()["request_id"] == "trace:7/a"


@pytest.mark.parametrize("odd", ["", "a b", "x" * 129, "-x", '"', "é"])
def test_an_id_that_could_forge_a_line_is_replaced(locked: LiveServer, odd: str) -> None:
    with plain(locked) as http:
        reply = http.get("/", headers={"x-request-id": odd.encode()})  # type: ignore[dict-item]
    assert reply.headers["x-request-id"].startswith("req_")


# --- limits


def test_a_body_above_the_limit_is_a_413(locked: LiveServer) -> None:
    with plain(locked, authorization=f"Bearer {KEY}") as http:
        reply = http.post("/api/chat", json={"model": "x" * 5000})
        assert (reply.status_code, "at most 4096" in reply.json()["error"]) == (413, True)
        unannounced = http.post("/v1/messages", content=iter([b"{" + b" " * 5000]))
        assert (unannounced.status_code, unannounced.json()["error"]["type"]) == (413, "request_too_large")
        assert http.post("/api/chat", json=asked("in") | {"stream": False}).json()["message"]["content"] == "in"


def test_a_head_above_the_limit_is_refused_while_it_comes(locked: LiveServer) -> None:
    with socket.create_connection(("127.0.0.1", locked.port), timeout=10) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * (80 << 10))
        assert client.recv(1024).startswith(b"HTTP/1.1 400 ")


# --- the end


def ending(tmp_path: Path, grace: float, **manner: object) -> tuple[list[str], float]:
    """The lines of a reply that is under way while its server stops, and how long the stop took."""
    lines: list[str] = []
    first = threading.Event()
    with live_server(tmp_path, echo_command(tmp_path), shutdown_grace=grace) as running:
        put_model(running.store, "tiny")

        def ask() -> None:
            with plain(running) as http, http.stream("POST", "/api/chat", json=asked("abcdefgh", **manner)) as reply:
                for line in reply.iter_lines():
                    lines.append(line)
                    first.set()

        thread = threading.Thread(target=ask)
        thread.start()
        assert first.wait(10)
        idle = socket.create_connection(("127.0.0.1", running.port), timeout=10)
        began = time.monotonic()
    took = time.monotonic() - began
    thread.join()
    assert idle.recv(1) == b""
    idle.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", running.port), timeout=10)
    return lines, took


def test_a_reply_in_flight_comes_to_its_end_before_the_server_does(tmp_path: Path) -> None:
    lines, took = ending(tmp_path, 10.0, delay=0.05)
    assert "".join(json.loads(line)["message"]["content"] for line in lines) == "abcdefgh"
    assert json.loads(lines[-1])["done_reason"] == "stop"
    assert took < 5


def test_a_reply_that_takes_too_long_is_cut_off_with_an_error(tmp_path: Path) -> None:
    lines, took = ending(tmp_path, 0.2, delay=0.05, endless=True)
    assert json.loads(lines[-1]) == {"error": "the runner of tiny:latest was stopped"}
    assert 0.2 <= took < 5


@pytest.mark.parametrize("signal", [SIGTERM, SIGINT])
def test_a_second_signal_ends_the_waiting(tmp_path: Path, signal: int, caplog: pytest.LogCaptureFixture) -> None:
    with live_server(tmp_path, echo_command(tmp_path), shutdown_grace=60.0) as running:
        put_model(running.store, "tiny")
        with (
            plain(running) as http,
            http.stream("POST", "/api/chat", json=asked("ab", endless=True, delay=0.05)) as reply,
        ):
            lines = reply.iter_lines()
            next(lines)
            running._server.handle_exit(signal, None)
            for _ in range(8):
                assert "error" not in json.loads(next(lines))
            running._server.handle_exit(signal, None)
            second = time.monotonic()
            assert json.loads(list(lines)[-1]) == {"error": "the runner of tiny:latest was stopped"}
    assert time.monotonic() - second < 30
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    ("environ", "warned"),
    [
        ({}, False),
        ({"ARRIERO_HOST": "0.0.0.0"}, True),
        ({"ARRIERO_HOST": "[::]"}, True),
        ({"ARRIERO_HOST": "0.0.0.0", "OLLAMA_API_KEY": "of another service"}, True),
        ({"ARRIERO_HOST": "0.0.0.0", "ARRIERO_API_KEY": KEY}, False),
        ({"ARRIERO_HOST": "localhost"}, False),
    ],
)
def test_a_server_that_is_open_to_others_without_a_key_says_so(environ: dict[str, str], warned: bool) -> None:
    assert (exposure(Settings.from_environ(environ)) is not None) == warned
