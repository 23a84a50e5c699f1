"""Who may talk to the server: CORS by origin patterns, and the `Host` check against DNS rebinding.

A web page that a person visits must not be able to drive the server of their machine, neither directly (CORS) nor by
a host name that resolves to loopback (the Host check, active when the server listens on loopback only).
"""

from __future__ import annotations

import ipaddress
import logging
import re
import socket
from collections.abc import Iterable

import psutil
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from arriero.errors import Forbidden
from arriero.server.errors import scoped_error

log = logging.getLogger(__name__)

_SCHEMES = ("app", "file", "tauri", "vscode-webview", "vscode-file")
_EXTENSIONS = ("chrome-extension", "moz-extension", "safari-web-extension")
_STAINLESS = "arch async custom-poll-interval helper-method lang os package-version poll-helper retry-count runtime"
ALLOWED_HEADERS = ", ".join(
    ["Authorization", "Content-Type", "User-Agent", "Accept", "X-Requested-With", "X-Request-Id", "OpenAI-Beta"]
    + ["OpenAI-Organization", "OpenAI-Project", "Idempotency-Key"]
    + ["x-api-key", "anthropic-version", "anthropic-beta", "anthropic-dangerous-direct-browser-access"]
    + [f"x-stainless-{part}" for part in (*_STAINLESS.split(), "runtime-version", "timeout")]
)
ALLOWED_METHODS = "GET, POST, PUT, PATCH, DELETE, HEAD, OPTIONS"
_LOCAL_SUFFIXES = (".localhost", ".local", ".internal")


def default_origins() -> list[str]:
    """The patterns that are always allowed: pages of this machine, desktop apps and browser extensions."""
    hosts = [f"{scheme}://{host}" for host in ("localhost", "127.0.0.1", "0.0.0.0") for scheme in ("http", "https")]
    return [*hosts, *(f"{host}:*" for host in hosts), *(f"{scheme}://*" for scheme in (*_SCHEMES, *_EXTENSIONS))]


class Origins:
    """A set of origin patterns in which `*` stands for any text."""

    def __init__(self, extra: Iterable[str] = ()) -> None:
        patterns = [*extra, *default_origins()]
        self.everything = "*" in patterns
        self._pattern = re.compile(
            "|".join(".*".join(re.escape(part) for part in pattern.split("*")) for pattern in patterns), re.IGNORECASE
        )

    def allow(self, origin: str) -> bool:
        """Whether pages of this origin may call the server."""
        return self._pattern.fullmatch(origin) is not None


def host_name(host: str) -> str:
    """The name or address of a `Host` header, without port and brackets, in lower case."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0] if host.count(":") == 1 else host


def is_loopback(host: str) -> bool:
    """Whether a listening address is reachable from this machine only."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def own_addresses() -> frozenset[str]:
    """The addresses of this machine's interfaces."""
    families = (socket.AF_INET, socket.AF_INET6)
    return frozenset(
        address.address.partition("%")[0]
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family in families
    )


def host_allowed(header: str, *, own_name: str, own_addresses: frozenset[str]) -> bool:
    """Whether a `Host` header names this machine: a local address, the machine's name, or a local-only domain."""
    name = host_name(header)
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name in ("", "localhost", own_name.lower()) or name.rstrip(".").endswith(_LOCAL_SUFFIXES)
    return address.is_loopback or address.is_private or address.is_unspecified or str(address) in own_addresses


class Guard:
    """ASGI middleware: refuses foreign hosts and origins with 403, answers preflights, adds CORS headers."""

    def __init__(self, app: ASGIApp, *, listen_host: str, origins: Origins) -> None:
        self.app = app
        self.origins = origins
        self.check_host = is_loopback(listen_host)
        self.own_name = socket.gethostname()
        self.own_addresses = own_addresses() if self.check_host else frozenset()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through, or answer it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin", "")
        if self.check_host and not host_allowed(host, own_name=self.own_name, own_addresses=self.own_addresses):
            log.warning("refused a request for host %r: the server listens on loopback only", host)
            refusal = Forbidden(
                f"{host!r:.80} is not a name of this machine, and the server listens on loopback only: use localhost, "
                "or let the proxy in between send 'Host: localhost'"
            )
            await scoped_error(scope, refusal)(scope, receive, send)
            return
        foreign = bool(origin) and origin != f"{scope['scheme']}://{host}"
        if foreign and not self.origins.allow(origin):
            log.warning("refused origin %r; ARRIERO_ORIGINS adds origins", origin)
            refusal = Forbidden(f"pages of {origin!r:.80} may not call this server: ARRIERO_ORIGINS adds origins")
            await scoped_error(scope, refusal)(scope, receive, send)
            return
        if scope["method"] == "OPTIONS":
            await Response(status_code=204, headers=self._preflight(origin, headers))(scope, receive, send)
            return

        async def send_with_cors(message: Message) -> None:
            if message["type"] == "http.response.start" and foreign:
                answer = MutableHeaders(scope=message)
                answer["Access-Control-Allow-Origin"] = self._allow_origin(origin)
                answer["Access-Control-Expose-Headers"] = "request-id, x-request-id"
                answer.add_vary_header("Origin")
            await send(message)

        await self.app(scope, receive, send_with_cors)

    def _allow_origin(self, origin: str) -> str:
        return "*" if self.origins.everything else origin

    def _preflight(self, origin: str, request: Headers) -> dict[str, str]:
        if not origin:
            return {"Allow": ALLOWED_METHODS}
        answer = {
            "Access-Control-Allow-Origin": self._allow_origin(origin),
            "Access-Control-Allow-Methods": ALLOWED_METHODS,
            "Access-Control-Allow-Headers": ALLOWED_HEADERS,
            "Access-Control-Max-Age": "43200",
            "Vary": "Origin",
        }
        if request.get("access-control-request-private-network") == "true":
            answer["Access-Control-Allow-Private-Network"] = "true"
        return answer
