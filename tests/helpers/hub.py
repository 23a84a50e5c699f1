"""A stand-in for Hugging Face's hub on loopback: the listing of a repository's files, and the files."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" * 6 + "abcd"


class FakeHub:
    """Repositories by `owner/name`: path → bytes. Files of 1000 bytes and more are kept as large ones, with a hash."""

    def __init__(self) -> None:
        self.repositories: dict[str, Mapping[str, bytes]] = {}
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.port = 0
        self.token = ""
        """What opens the repositories, '' = nothing is needed."""
        self.damaged: set[str] = set()
        """Paths that arrive with a wrong byte."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: FakeHub

    def log_message(self, *_: Any) -> None:
        return

    def do_GET(self) -> None:
        state, path = self.state, unquote(urlsplit(self.path).path)
        state.requests.append((self.path, dict(self.headers.items())))
        if state.token and self.headers.get("Authorization") != f"Bearer {state.token}":
            self._reply(401, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            self._listing(match[1], match[2] or "main")
        elif match := re.fullmatch(rf"/([^/]+/[^/]+)/resolve/{COMMIT}/(.+)", path):
            self._file(match[1], match[2])
        else:
            self._reply(404, b"{}", {"X-Error-Code": "EntryNotFound"})

    def _reply(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _listing(self, repository: str, revision: str) -> None:
        files = self.state.repositories.get(repository)
        if files is None:
            self._reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            return
        if revision not in ("main", "v2"):
            self._reply(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return
        siblings = []
        for path, data in files.items():
            entry: dict[str, Any] = {"rfilename": path, "size": len(data)}
            entry["blobId"] = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            if len(data) >= 1000:
                entry["blobId"] = "0" * 40
                entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
            siblings.append(entry)
        document = {"id": repository, "modelId": repository, "sha": COMMIT, "siblings": siblings, "tags": []}
        self._reply(200, json.dumps(document).encode(), {"Content-Type": "application/json"})

    def _file(self, repository: str, path: str) -> None:
        data = self.state.repositories[repository].get(path)
        if data is None:
            self._reply(404, b"")
            return
        if path in self.state.damaged:
            data = bytes([data[0] ^ 1]) + data[1:]
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked is None:
            self._reply(200, data)
            return
        start, end = int(asked[1]), int(asked[2]) + 1
        self._reply(206, data[start:end], {"Content-Range": f"bytes {start}-{end - 1}/{len(data)}"})


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """Run a FakeHub on a free loopback port."""
    state = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"state": state}))
    state.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
