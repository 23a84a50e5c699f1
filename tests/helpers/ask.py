"""Short ways to ask a server through a plain client, and to read what it answers."""

from __future__ import annotations

import json


def chat(http, text: str = "", /, model: str = "tiny", **fields):
    body = {"model": model, "stream": False, "messages": [{"role": "user", "content": text}]} | fields
    return http.post("/api/chat", json=body)


def generate(http, prompt: str = "", /, model: str = "tiny", **fields):
    return http.post("/api/generate", json={"model": model, "stream": False, "prompt": prompt} | fields)


def lines(reply) -> list[dict]:
    return [json.loads(line) for line in reply.text.splitlines()]


def error(reply, status: int = 400) -> str:
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json; charset=utf-8"
    return reply.json()["error"]
