"""The HTTP client of the command line, on the standard library: a verb must not wait for imports.

httpx costs more than 100 ms to import, which is more than `arriero list` may take in all.
"""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from arriero import __version__
from arriero.errors import ArrieroError, ServerUnreachable
from arriero.settings import DEFAULT_HOST, Settings

_CHUNK = 1 << 20


class ApiError(ArrieroError):
    """The server answered with an error; carries its status and text."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Client:
    """Talks to one server. Each call opens its own connection, so a dropped one never poisons the next."""

    def __init__(self, host: str, port: int, scheme: str = "http", api_key: str = "") -> None:
        # A server that listens everywhere is reached on loopback.
        self.host = DEFAULT_HOST if host in ("0.0.0.0", "::") else host
        self.port = port
        self.scheme = scheme
        # As bytes: http.client refuses text outside Latin-1.
        self._key = {"Authorization": b"Bearer " + api_key.encode()} if api_key else {}

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        return cls(settings.host, settings.port, settings.scheme, next(iter(settings.api_keys), ""))

    @property
    def address(self) -> str:
        """`http://host:port`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

    def is_up(self, timeout: float = 2.0) -> bool:
        """Whether anything that speaks HTTP answers."""
        try:
            connection = self._connect(timeout)
            try:
                connection.request("HEAD", "/")
                return connection.getresponse().status < 500
            finally:
                connection.close()
        except (OSError, http.client.HTTPException):
            return False

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """One request and its JSON reply (None when empty); raises ApiError or ServerUnreachable."""
        with self._request(method, path, body) as response:
            data = response.read()
            return self._decoded(data) if data.strip() else None

    def stream(self, method: str, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The objects of an NDJSON reply as they arrive; an `error` line raises ApiError."""
        with self._request(method, path, body) as response:
            for line in response.lines():
                if not line.strip():
                    continue
                item = self._decoded(line)
                if not isinstance(item, dict):
                    raise self._foreign()
                if "error" in item:
                    raise ApiError(response.status, str(item["error"]))
                yield item

    def has_blob(self, digest: str) -> bool:
        """Whether the server's store holds a blob."""
        try:
            self.call("HEAD", f"/api/blobs/{digest}")
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        return True

    def upload(self, digest: str, path: Path, progress: Any = None) -> None:
        """Send a file as a blob; `progress(bytes so far, total)` is called as it goes."""
        total = path.stat().st_size

        def chunks() -> Iterator[bytes]:
            done = 0
            with path.open("rb") as file:
                while data := file.read(_CHUNK):
                    yield data
                    done += len(data)
                    if progress is not None:
                        progress(done, total)

        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(total)}
        with self._request("POST", f"/api/blobs/{digest}", chunks(), headers) as response:
            response.read()

    def _decoded(self, data: bytes) -> Any:
        try:
            return json.loads(data)
        except ValueError:
            raise self._foreign() from None

    def _foreign(self) -> ServerUnreachable:
        return ServerUnreachable(
            f"what answers at {self.address} is neither arriero nor Ollama; set ARRIERO_HOST to where one listens"
        )

    def _connect(self, timeout: float | None = None) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self.scheme == "https" else http.client.HTTPConnection
        return kind(self.host, self.port, timeout=timeout)

    def _request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | Iterator[bytes] | None,
        headers: Mapping[str, str] | None = None,
    ) -> _Response:
        connection = self._connect()
        payload: Any = json.dumps(body).encode() if isinstance(body, Mapping) else body
        sent: dict[str, str | bytes] = {
            "User-Agent": f"arriero/{__version__}",
            "Content-Type": "application/json",
            **self._key,
        }
        sent |= headers or {}
        try:
            connection.request(method, path, payload, sent)
            response = connection.getresponse()
        except (ConnectionRefusedError, socket.gaierror, TimeoutError) as error:
            connection.close()
            raise ServerUnreachable(
                f"no server answers at {self.address} ({error}); start one with 'arriero serve', "
                "or set ARRIERO_HOST to where it listens"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise ServerUnreachable(f"the connection to {self.address} broke: {error}") from None
        if response.status >= 400:
            text = response.read().decode("utf-8", "replace")
            connection.close()
            if text.lstrip().startswith("<"):  # the error page of some web server
                raise self._foreign()
            raise ApiError(response.status, _error_text(text) or f"{response.status} {response.reason}")
        return _Response(connection, response)


class _Response:
    """A reply that closes its connection, and turns a cut one into a clear error."""

    def __init__(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        self._connection = connection
        self._response = response
        self.status = response.status

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def read(self) -> bytes:
        try:
            return self._response.read()
        except (OSError, http.client.HTTPException) as error:
            raise ServerUnreachable(f"the server closed the connection in the middle of a reply ({error})") from None

    def lines(self) -> Iterator[bytes]:
        """The lines of the body as they come."""
        # Not by `readline`, which takes a connection that is cut between two chunks for the end.
        rest = b""
        try:
            while piece := self._response.read1():
                *whole, rest = (rest + piece).split(b"\n")
                yield from whole
        except (OSError, http.client.HTTPException) as error:
            raise ServerUnreachable(f"the server closed the connection in the middle of a reply ({error})") from None
        if rest:
            yield rest


def _error_text(body: str) -> str:
    try:
        parsed = json.loads(body)
    except ValueError:
        return body.strip()[:500]
    error = parsed.get("error", "") if isinstance(parsed, dict) else ""
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
