"""A small HTTP server with scripted replies of the native API, for the command line's tests."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, Any]
"""Status and body: a list is sent as NDJSON, bytes as they are, anything else as JSON."""
Handler = Callable[[dict[str, Any]], Reply]

FACTS = {"details": {"family": "llama", "parameter_size": "135M"}, "model_info": {}, "capabilities": ["completion"]}


class FakeServer:
    """What it was asked, and what it answers."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, Any]] = []
        self.replies: dict[tuple[str, str], Handler] = {
            ("HEAD", "/"): lambda _: (200, b""),
            ("POST", "/api/show"): lambda _: (200, FACTS),
            ("POST", "/api/generate"): lambda body: (
                200,
                generate_reply("Hello ", "world.") if body.get("prompt") else {},
            ),
            ("POST", "/api/chat"): lambda _: (200, chat_reply("Hello ", "world.")),
        }
        self.port = 0

    def bodies(self, path: str) -> list[Any]:
        """The bodies sent to a path, in order."""
        return [body for _, at, body in self.requests if at == path]


def generate_reply(*pieces: str, **final: Any) -> list[dict[str, Any]]:
    """Chunks of `/api/generate`."""
    chunks: list[dict[str, Any]] = [{"response": piece, "done": False} for piece in pieces]
    timings = {"total_duration": 2_000_000_000, "eval_count": 4, "eval_duration": 1_000_000_000}
    return [*chunks, {"response": "", "done": True, "done_reason": "stop", **timings, **final}]


def chat_reply(*pieces: str, **final: Any) -> list[dict[str, Any]]:
    """Chunks of `/api/chat`."""
    chunks: list[dict[str, Any]] = [
        {"message": {"role": "assistant", "content": piece}, "done": False} for piece in pieces
    ]
    return [*chunks, {"message": {"role": "assistant", "content": ""}, "done": True, "done_reason": "stop", **final}]


@contextmanager
def fake_server() -> Iterator[FakeServer]:
    """Run a FakeServer on a free loopback port."""
    state = FakeServer()

    class Request(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            return

        def _answer(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = json.loads(data) if data and self.headers.get("Content-Type") == "application/json" else data
            state.requests.append((self.command, self.path, body))
            handler = state.replies.get((self.command, self.path))
            status, reply = (
                handler(body if isinstance(body, dict) else {}) if handler else (404, {"error": "no such path"})
            )
            self.send_response(status)
            self.end_headers()
            if self.command == "HEAD":
                return
            if isinstance(reply, list):
                for item in reply:
                    self.wfile.write(json.dumps(item).encode() + b"\n")
                    self.wfile.flush()
            else:
                self.wfile.write(reply if isinstance(reply, bytes) else json.dumps(reply).encode())

        do_GET = do_POST = do_HEAD = do_DELETE = _answer

    server = ThreadingHTTPServer(("127.0.0.1", 0), Request)
    state.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
