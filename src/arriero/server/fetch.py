"""Files at addresses that a request names, fetched so that no request can use this server to reach what it should not.

A server that fetches is a way into the network around it. So: HTTP and HTTPS on their own ports only; a host is
looked up once, every address that it has must be a public one, and the connection goes to the address that was
checked (a name that points elsewhere a moment later changes nothing); each redirect is a new address with the same
rules; proxies and credentials of the environment are not used; and kind, size and time are bounded while it comes.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence

import httpx

from arriero.errors import InvalidRequest
from arriero.server.guard import own_addresses

log = logging.getLogger(__name__)

SECONDS = 20.0
"""For one file, lookups and redirects included."""
REDIRECTS = 4
_PORTS = frozenset((80, 443))
_KINDS = ("image/", "application/octet-stream", "binary/octet-stream")
_SHOWN = 120

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_INNER = tuple(
    map(
        ipaddress.ip_network,
        (
            "168.63.129.16/32",  # a cloud's machines reach its host by it, on every network of theirs
            "192.0.0.0/24",  # protocol assignments, and a cloud's metadata at .192
            "192.88.99.0/24",
            "3fff::/20",
            "fec0::/10",  # what came before fc00::/7; networks that still have it route it
        ),
    )
)
"""Networks that Python's `is_global`, which differs from version to version, takes for public ones."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


class FetchError(InvalidRequest):
    """A file that can't or must not be fetched; the message names its address without the query, a possible secret."""


def is_public(address: Address) -> bool:
    """Whether an address belongs to the public internet; those that stand for an IPv4 address are judged by that."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id is not None or address.teredo is not None:
            return False
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
    if any(address in network for network in _INNER):
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def is_elsewhere(address: Address) -> bool:
    """Whether an address is public and not this machine's own: what listens on that may be behind a firewall."""
    plain = getattr(address, "ipv4_mapped", None) or address
    return is_public(address) and str(plain) not in own_addresses()


async def look_up(host: str, port: int) -> list[str]:
    """All addresses of a host, in the system's order; OSError when there are none."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class Fetcher:
    """Fetches files by the module's rules; the defaults are those of a server, others are for tests."""

    def __init__(
        self,
        *,
        resolve: Resolve = look_up,
        allowed: Callable[[Address], bool] = is_elsewhere,
        ports: frozenset[int] | None = _PORTS,
        seconds: float = SECONDS,
        trust: ssl.SSLContext | None = None,
    ) -> None:
        self._resolve = resolve
        self._allowed = allowed
        self._ports = ports
        self._seconds = seconds
        self._trust = trust
        self._at_once = asyncio.Semaphore(8)

    async def fetch(self, address: str, limit: int) -> bytes:
        """The bytes at an address, at most `limit`; FetchError for everything that goes wrong or is not allowed."""
        async with self._at_once:
            try:
                async with asyncio.timeout(self._seconds):
                    return await self._follow(address, limit)
            except TimeoutError:
                raise FetchError(f"{shown(address)} did not come within {self._seconds:g} s") from None

    async def _follow(self, address: str, limit: int) -> bytes:
        url = _parsed(address)
        for _ in range(REDIRECTS + 1):
            found = await self._get(url, limit)
            if isinstance(found, bytes):
                log.info("fetched %d bytes from %s", len(found), url.host)
                return found
            if url.scheme == "https" and found.scheme != "https":
                raise FetchError(f"{shown(url)} redirects to a connection that is not encrypted")
            url = found
        raise FetchError(f"{shown(address)} redirects more than {REDIRECTS} times")

    async def _get(self, url: httpx.URL, limit: int) -> bytes | httpx.URL:
        """The file, or where it is."""
        host, port = self._checked(url)
        trouble: Exception | None = None
        for address in await self._addresses(url, host, port):
            pinned = url.copy_with(host=str(address), fragment=None)
            headers = {"Host": url.netloc.decode("ascii"), "Accept": "image/*", "Accept-Encoding": "identity"}
            try:
                async with httpx.AsyncClient(
                    trust_env=False,
                    verify=self._context(),
                    timeout=self._seconds,
                    follow_redirects=False,
                    headers=headers,
                ) as client:
                    # The certificate must be the host's, though the connection is made to an address.
                    request = client.build_request("GET", pinned, extensions={"sni_hostname": host})
                    reply = await client.send(request, stream=True)
                    try:
                        return await _taken(url, reply, limit)
                    finally:
                        await reply.aclose()
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                trouble = error
            except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
                raise FetchError(f"{shown(url)} cannot be fetched: {error or type(error).__name__}") from None
        raise FetchError(f"{shown(url)} cannot be reached: {trouble or 'no connection'}")

    def _checked(self, url: httpx.URL) -> tuple[str, int]:
        if url.scheme not in ("http", "https"):
            raise FetchError(f"{shown(url)}: only http and https are fetched")
        if url.userinfo:
            raise FetchError(f"{shown(url)}: addresses with a user's name or a password are not fetched")
        host = url.raw_host.decode("ascii")
        if not host:
            raise FetchError(f"{shown(url)} has no host")
        port = url.port or (443 if url.scheme == "https" else 80)
        if not 0 < port < 1 << 16:
            raise FetchError(f"{shown(url)}: there is no port {port}")
        if self._ports is not None and port not in self._ports:
            raise FetchError(f"{shown(url)}: files are fetched from the ports 80 and 443 only")
        return host, port

    async def _addresses(self, url: httpx.URL, host: str, port: int) -> list[Address]:
        """The addresses of a host; FetchError when one of them is not public, whichever the system would take."""
        try:
            found = [ipaddress.ip_address(text) for text in await self._resolve(host, port)]
        except (OSError, UnicodeError, ValueError) as error:
            raise FetchError(f"{shown(url)}: the host has no address ({error})") from None
        if not found or not all(map(self._allowed, found)):
            raise FetchError(
                f"{shown(url)}: the host is not on the public internet, or this machine, so nothing is fetched from it"
            )
        return found

    def _context(self) -> ssl.SSLContext:
        if self._trust is None:
            self._trust = httpx.create_ssl_context(trust_env=False)
        return self._trust


async def _taken(url: httpx.URL, reply: httpx.Response, limit: int) -> bytes | httpx.URL:
    if reply.has_redirect_location:
        return _parsed(reply.headers["location"], url)
    if reply.status_code != 200:
        raise FetchError(f"{shown(url)} answers {reply.status_code}")
    kind = reply.headers.get("content-type", "").lower().strip()
    if kind and not kind.startswith(_KINDS):
        raise FetchError(f"{shown(url)} is no image: its type is {kind[:60]!r}")
    if reply.headers.get("content-encoding", "identity").lower() != "identity":
        raise FetchError(f"{shown(url)} comes compressed, which was not asked for")
    announced = reply.headers.get("content-length", "")
    pieces, size = [], int(announced) if announced.isdecimal() else 0
    if size <= limit:
        size = 0
        async for piece in reply.aiter_raw():
            size += len(piece)
            if size > limit:
                break
            pieces.append(piece)
    if size > limit:
        raise FetchError(f"{shown(url)} is larger than {limit} bytes")
    return b"".join(pieces)


def _parsed(address: str, base: httpx.URL | None = None) -> httpx.URL:
    try:
        return httpx.URL(address) if base is None else base.join(address)
    except (httpx.InvalidURL, UnicodeError, ValueError) as error:
        raise FetchError(f"{shown(address)} is no address: {error}") from None


def shown(address: str | httpx.URL) -> str:
    """An address for messages: without what may be secret, and not long."""
    text = str(address).partition("?")[0].partition("#")[0]
    scheme, found, rest = text.partition("://")
    if found:
        authority, slash, path = rest.partition("/")
        text = f"{scheme}://{authority.rpartition('@')[2]}{slash}{path}"
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")
