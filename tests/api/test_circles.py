"""A reply that goes round in circles of tags that nobody gets to see is cut off, and each API says so in its way."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.helpers.echo_runner import say
from tests.helpers.live_server import LiveServer
from tests.helpers.stored_model import SPECIAL, put_model

CLOSING = "<tool_call|>"
REASONS: dict[str, Any] = {
    "/api/chat": lambda reply: (reply["done_reason"], reply["eval_count"]),
    "/v1/chat/completions": lambda reply: (
        reply["choices"][0]["finish_reason"],
        reply["usage"]["completion_tokens"],
    ),
    "/v1/messages": lambda reply: (reply["stop_reason"], reply["usage"]["output_tokens"]),
}


@pytest.mark.parametrize(
    ("path", "reason"),
    [("/api/chat", "repetition"), ("/v1/chat/completions", "length"), ("/v1/messages", "max_tokens")],
)
def test_a_circle_is_cut_off(server: LiveServer, http: httpx.Client, path: str, reason: str) -> None:
    put_model(server.store, "circling", parser="gemma4", special=(*SPECIAL, CLOSING))
    question = say("", tokens=[256 + len(SPECIAL)], endless=True)
    body = {"model": "circling", "stream": False, "messages": [{"role": "user", "content": question}]}
    reply = http.post(path, json=body | ({} if path == "/api/chat" else {"max_tokens": 2000})).json()
    assert REASONS[path](reply) == (reason, 16)
