"""A registry on loopback: serves and takes models by Ollama's protocol, with the faults that a test asks for."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from arriero.store import manifests
from arriero.store.manifests import ConfigBlob, Layer, Manifest


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


class FakeRegistry:
    """What it holds, how it misbehaves, what it was asked."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, bytes] = {}
        """By `namespace/model/tag`."""
        self.port = 0
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.sent: Counter[str] = Counter()
        """Bytes of each blob that left."""
        self.lock = threading.Lock()
        self.ranges = True
        self.range_head = "bytes {start}-{last}/{size}"
        """What a reply says that it is a range of."""
        self.login = False
        self.realm = ""
        """Another login server than ourselves."""
        self.token = "t0"
        self.accepted: str | None = None
        """The token that opens doors, where it is not the one that is given."""
        self.logins: list[dict[str, Any]] = []
        self.redirect: Callable[[str], str] | None = None
        """Where a blob's path leads."""
        self.cuts: list[int] = []
        """Bodies of blobs that end after so many bytes; each holds for one."""
        self.wrong: dict[int, int] = {}
        """Offset → how many of the replies that cover it have a wrong byte there."""
        self.pace: Callable[[int], float] | None = None
        """Seconds to wait before 64 KiB, by the number of the reply."""
        self.endless = False
        self.failures: list[int] = []
        """Statuses that the next requests for blobs get."""
        self.manifest_failures: list[int] = []
        self.manifest_reply: bytes | None = None
        self.mode = "chunks"
        """How uploads go: `chunks` (PATCH), `redirect` (307 to another path) or `direct`."""
        self.uploads: dict[str, bytearray] = {}
        self.mounted: list[str] = []

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def add(
        self,
        name: str,
        layers: Mapping[str, bytes],
        *,
        tensors: Mapping[str, bytes] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> Manifest:
        """A model `namespace/model:tag` of layers by the end of their media type, and of named tensors."""
        made = []
        for kind, data in layers.items():
            self.blobs[digest_of(data)] = data
            media = f"application/vnd.ollama.image.{kind.partition('#')[0]}"
            made.append(Layer(media_type=media, digest=digest_of(data), size=len(data)))
        for tensor, data in (tensors or {}).items():
            self.blobs[digest_of(data)] = data
            made.append(Layer(media_type=manifests.TENSOR, digest=digest_of(data), size=len(data), name=tensor))
        document = {"model_format": "gguf", "model_family": "llama", **(config or {})}
        blob = ConfigBlob.decode(json.dumps(document).encode()).encode()
        self.blobs[digest_of(blob)] = blob
        manifest = Manifest.build(Layer(media_type=manifests.CONFIG, digest=digest_of(blob), size=len(blob)), made)
        self.manifests[name.replace(":", "/")] = manifest.raw
        return manifest

    def count(self, method: str, pattern: str) -> int:
        """Requests of a method whose path matches."""
        return sum(m == method and re.search(pattern, path) is not None for m, path, _ in self.requests)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: FakeRegistry

    def log_message(self, *_: Any) -> None:
        return

    def _go(self) -> None:
        state = self.state
        path = urlsplit(self.path).path
        with state.lock:
            state.requests.append((self.command, self.path, dict(self.headers.items())))
        if path == "/token":
            self._login()
            return
        if (
            state.login
            and path.startswith("/v2/")
            and self.headers.get("Authorization") != f"Bearer {state.accepted or state.token}"
        ):
            realm = state.realm or f"http://{state.host}/token"
            self._reply(
                401,
                b'{"errors":[{"code":"UNAUTHORIZED"}]}',
                {"WWW-Authenticate": f'Bearer realm="{realm}",service="s",scope="repository:a/b:pull repository:c"'},
            )
            return
        if match := re.fullmatch(r"/v2/(.+)/(.+)/manifests/(.+)", path):
            self._manifest("/".join(match.groups()))
        elif match := re.fullmatch(r"/v2/.+/.+/blobs/(sha256:[0-9a-f]{64})", path):
            if state.redirect is not None and self.command == "GET":
                self._reply(307, b"", {"Location": state.redirect(match[1])})
            else:
                self._blob(match[1])
        elif match := re.fullmatch(r"/cdn/(sha256:[0-9a-f]{64})", path):
            self._blob(match[1])
        elif "/blobs/uploads/" in path:
            self._upload(path)
        elif path.startswith("/direct/"):
            state.uploads[path.rpartition("/")[2]] = bytearray(self._body())
            self._reply(200)
        elif path.startswith("/elsewhere/"):
            state.uploads[path.rpartition("/")[2]] += self._body()
            self._reply(201)
        else:
            self._reply(404, b"no such path")

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = _go

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _reply(self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _login(self) -> None:
        url = f"http://{self.state.host}{self.path}"
        self.state.logins.append(
            {"url": url, "query": parse_qs(urlsplit(self.path).query), "proof": self.headers.get("Authorization")}
        )
        self._reply(200, json.dumps({"token": self.state.token}).encode())

    def _manifest(self, key: str) -> None:
        if self.command == "PUT":
            self.state.manifests[key] = self._body()
            self._reply(201)
        elif self.state.manifest_failures:
            self._reply(self.state.manifest_failures.pop(0), b"busy")
        elif self.state.manifest_reply is not None:
            self._reply(200, self.state.manifest_reply)
        elif key in self.state.manifests:
            self._reply(200, self.state.manifests[key])
        else:
            self._reply(404, b'{"errors":[{"code":"MANIFEST_UNKNOWN"}]}')

    def _blob(self, digest: str) -> None:
        state = self.state
        data = state.blobs.get(digest)
        # Small blobs are spared, so that a test can count on where its faults fall.
        faulty = self.command == "GET" and data is not None and len(data) > 10_000
        with state.lock:
            failure = state.failures.pop(0) if state.failures and faulty else 0
        if failure or data is None:
            self._reply(failure or 404, b"it failed" if failure else b"")
            return
        start, end, status = 0, len(data), 200
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked and state.ranges:
            start, end, status = int(asked[1]), min(int(asked[2]) + 1, len(data)), 206
        body = bytearray(data[start:end])
        with state.lock:
            number = state.count("GET", "sha256:")
            cut = state.cuts.pop(0) if state.cuts and faulty else None
            for offset, times in state.wrong.items():
                if start <= offset < end and times > 0 and faulty:
                    body[offset - start] ^= 0xFF
                    state.wrong[offset] -= 1
        self.send_response(status)
        if state.endless:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", str(end - start))
        if status == 206:
            self.send_header("Content-Range", state.range_head.format(start=start, last=end - 1, size=len(data)))
        self.end_headers()
        if self.command == "HEAD":
            return
        try:
            self._send(digest, bytes(body[:cut]), number)
        except OSError:
            self.close_connection = True  # the client has gone
        if cut is not None:
            self.close_connection = True

    def _send(self, digest: str, body: bytes, number: int) -> None:
        state = self.state
        while state.endless:
            self.wfile.write(b"10000\r\n" + bytes(65536) + b"\r\n")
            state.sent[digest] += 65536
        for at in range(0, len(body), 65536):
            if state.pace is not None:
                time.sleep(state.pace(number))
            piece = body[at : at + 65536]
            self.wfile.write(piece)
            with state.lock:
                state.sent[digest] += len(piece)

    def _upload(self, path: str) -> None:
        state, query = self.state, parse_qs(urlsplit(self.path).query)
        base = f"http://{state.host}{path}"
        if self.command == "POST":
            self._body()
            if "mount" in query:
                state.mounted.append(query["mount"][0])
                self._reply(201)
                return
            session = f"s{len(state.uploads)}"
            state.uploads[session] = bytearray()
            headers = {"Location": base + session}
            if state.mode == "direct":
                headers["X-Direct-Upload-URL"] = f"http://{state.host}/direct/{session}"
                headers["X-Signed-Header-X-Proof"] = "signed"
            self._reply(202, b"", headers)
        elif self.command == "PATCH":
            session, body = path.rpartition("/")[2], self._body()
            if state.mode == "redirect":
                where = f"http://{state.host}/elsewhere/{session}"
                self._reply(307, b"", {"Location": where, "Docker-Upload-Location": base})
                return
            at = int(self.headers["Content-Range"].partition("-")[0])
            if state.cuts:
                state.cuts.pop()
                self._reply(503, b"busy")
                return
            assert at == len(state.uploads[session])
            state.uploads[session] += body
            self._reply(202, b"", {"Docker-Upload-Location": base})
        else:
            data = bytes(state.uploads[path.rpartition("/")[2]])
            if digest_of(data) != query["digest"][0]:
                self._reply(400, b"digest invalid")
                return
            state.blobs[query["digest"][0]] = data
            self._reply(201)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # a client that leaves is no fault
            super().handle_error(request, client_address)


def verified(proof: str, message: bytes) -> bool:
    """Whether `<public key>:<signature>` signs a message."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    public, _, signature = proof.partition(":")
    key = load_ssh_public_key(b"ssh-ed25519 " + public.encode())
    try:
        key.verify(base64.b64decode(signature), message)  # type: ignore[union-attr, call-arg]
    except InvalidSignature:
        return False
    return True


@contextmanager
def fake_registry() -> Iterator[FakeRegistry]:
    """Run a FakeRegistry on a free loopback port."""
    state = FakeRegistry()
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"state": state}))
    state.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        state.endless = False
        server.shutdown()
        server.server_close()
        thread.join()
