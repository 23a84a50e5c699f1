"""One host over HTTP: logging in, redirects, and replies that are never read past their limit."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Self, TypeVar

import httpx

from arriero import __version__
from arriero.errors import Cancelled, NotFound, RegistryError
from arriero.store.registry.address import follow, same_host
from arriero.store.registry.limits import Limits

log = logging.getLogger(__name__)
T = TypeVar("T")
_REDIRECTS = 10
_MOVED = (301, 302, 303, 307, 308)


class Temporary(RegistryError):
    """A failure that may be gone with the next try."""


def retried(work: Callable[[], T], limits: Limits, ended: threading.Event) -> T:
    """What `work` gives, tried again while it fails with Temporary; raises RegistryError after `limits.tries`."""
    attempt = 0
    while True:
        attempt += 1
        try:
            return work()
        except Temporary as error:
            if attempt >= limits.tries:
                raise RegistryError(f"{error}; given up after {attempt} tries") from None
            log.info("%s; next try", error)
            if ended.wait(min(limits.backoff * 2 ** (attempt - 1), 30.0)):
                raise Cancelled("the transfer was given up") from None


class Client:
    """Requests that begin at one host; safe to use from several threads."""

    def __init__(self, root: httpx.URL, limits: Limits, *, token: str = "") -> None:
        """`token` is shown to this host alone."""
        self.root = root
        self.limits = limits
        self._token = token
        self._login = threading.Lock()
        self._aborted = False
        self._reached = False
        """Whether anything has answered yet: until then a connection that is not made is no passing failure."""
        self._sockets: set[socket.socket] = set()
        self._http = httpx.Client(
            headers={"User-Agent": f"arriero/{__version__}", "Accept-Encoding": "identity"},
            timeout=httpx.Timeout(limits.stall, connect=min(10.0, limits.stall), pool=None),
            limits=httpx.Limits(max_connections=2 * limits.streams + 4, max_keepalive_connections=limits.streams),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def abort(self) -> None:
        """End all transfers at once, from another thread; they raise Cancelled."""
        self._aborted = True
        for connection in list(self._sockets):
            with suppress(OSError):
                # The plain socket's own method: that of a TLS socket would pull the session away under its reader.
                socket.socket.shutdown(connection, socket.SHUT_RDWR)

    @contextmanager
    def open(
        self,
        method: str,
        url: httpx.URL,
        *,
        headers: Mapping[str, str] | None = None,
        content: bytes | Iterable[bytes] | None = None,
        accept: tuple[int, ...] = (),
        redirects: bool = True,
        anonymous: bool = False,
    ) -> Iterator[httpx.Response]:
        """The reply to a request, its body unread; logs in when asked to, follows redirects.

        Statuses from 400 on are errors unless in `accept`; `anonymous` never shows a token. Raises NotFound,
        RegistryError, Temporary (worth a retry), Cancelled. `content` must be bytes where a login may be asked for.
        """
        current, hops, asked_again = url, 0, False
        while True:
            token = self._token
            known = same_host(current, self.root) and not anonymous
            sent = {**(headers or {}), **({"Authorization": f"Bearer {token}"} if token and known else {})}
            with self._sent(self._http.build_request(method, current, headers=sent, content=content)) as response:
                status = response.status_code
                if redirects and status in _MOVED:
                    hops += 1
                    if hops > _REDIRECTS:
                        raise RegistryError(f"{self.root.host} redirects more than {_REDIRECTS} times")
                    current = follow(self.root, current, response.headers.get("Location", ""))
                elif status == 401 and known:
                    if asked_again:
                        raise self.denied()
                    asked_again = True
                    with self._login:
                        # Of the threads that were refused with the same token, the first gets the next for all.
                        if self._token == token:
                            self._token = self.log_in(response.headers.get("WWW-Authenticate", ""))
                elif status >= 400 and status not in accept:
                    raise self._refusal(response, current)
                else:
                    yield response
                    return

    def read(self, response: httpx.Response, limit: int, what: str) -> bytes:
        """A small body as a whole; raises RegistryError when it is larger than `limit` bytes."""
        data = bytearray()
        for piece in response.iter_raw():
            data += piece
            if len(data) > limit:
                raise RegistryError(f"{what} from {self.root.host} is larger than {limit} bytes; it is refused")
        return bytes(data)

    def log_in(self, challenge: str) -> str:
        """A token for a `WWW-Authenticate` header; raises RegistryError where there is no way to get one."""
        raise self.denied()

    def denied(self) -> RegistryError:
        """What to say when the host knows us and still refuses."""
        return RegistryError(f"unauthorized: access denied by {self.root.host}")

    @contextmanager
    def _sent(self, request: httpx.Request) -> Iterator[httpx.Response]:
        """A reply that is closed in the end; failures of the connection are Temporary, or Cancelled once aborted.

        RegistryError when there is no connection to begin with: offline, or a host that is not there.
        """
        connection: socket.socket | None = None
        try:
            if self._aborted:
                raise Cancelled("the transfer was given up")
            response = self._http.send(request, stream=True)
            self._reached = True
            try:
                connection = response.extensions["network_stream"].get_extra_info("socket")
                if connection is not None:
                    self._sockets.add(connection)
                if self._aborted:  # after the line above, or an abort in between would miss this connection
                    raise Cancelled("the transfer was given up")
                yield response
            finally:
                if connection is not None:
                    self._sockets.discard(connection)
                response.close()
        except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL) as error:
            if self._aborted:
                raise Cancelled("the transfer was given up") from None
            what = str(error) or type(error).__name__
            unmade = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            if isinstance(error, httpx.TimeoutException):
                what = f"nothing came for {request.extensions['timeout']['connect' if unmade else 'read']:g} s"
            if unmade and not self._reached:
                raise RegistryError(f"{request.url.host} cannot be reached: {what}") from None
            raise Temporary(f"the connection to {request.url.host} failed: {what}") from None

    def _refusal(self, response: httpx.Response, url: httpx.URL) -> RegistryError | NotFound:
        status = response.status_code
        if status == 404:
            return NotFound("file does not exist")
        data = bytearray()
        for piece in response.iter_raw():
            data += piece
            if len(data) > self.limits.reply:
                break
        text = " ".join(data[:500].decode("utf-8", "replace").split())
        kind = Temporary if status in (408, 425, 429) or status >= 500 else RegistryError
        return kind(f"{url.host} answers {status}: {text or response.reason_phrase}")
