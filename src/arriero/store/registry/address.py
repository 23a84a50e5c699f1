"""Where a registry may send us: checks of the addresses in its replies."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable

import httpx

from arriero.errors import InvalidRequest, RegistryError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def base_url(host: str, scheme: str, *, insecure: bool) -> httpx.URL:
    """The root of a registry; raises InvalidRequest for plain HTTP that was not asked for."""
    if scheme not in ("http", "https"):
        raise InvalidRequest(f"a registry is reached by https or http, not by {scheme!r}")
    if scheme == "http" and not insecure:
        raise InvalidRequest(
            f"insecure protocol http: {host} would be reached without encryption; say so with --insecure "
            '("insecure": true)'
        )
    try:
        url = httpx.URL(f"{'http' if insecure else 'https'}://{host}/")
    except httpx.InvalidURL as error:
        raise InvalidRequest(f"{host!r} is not the address of a registry: {error}") from None
    if not url.host:
        raise InvalidRequest(f"{host!r} is not the address of a registry")
    return url


def same_host(one: httpx.URL, other: httpx.URL) -> bool:
    """Whether credentials for one may be shown to the other: scheme, host and port are equal."""
    return (one.scheme, one.host, _port(one)) == (other.scheme, other.host, _port(other))


def follow(origin: httpx.URL, current: httpx.URL, location: str) -> httpx.URL:
    """The target of a redirect that leads away from `current`, for a transfer that began at `origin`.

    Raises RegistryError for one that leaves HTTP, drops encryption, or leads from the open network into this machine
    or its private network.
    """
    try:
        target = current.join(location)
    except (httpx.InvalidURL, ValueError):
        raise RegistryError(f"{origin.host} redirects to {location[:200]!r}, which is no address") from None
    if target.scheme not in ("http", "https") or not target.host:
        raise RegistryError(f"{origin.host} redirects to {location[:200]!r}; only https and http are followed")
    if origin.scheme == "https" and target.scheme == "http":
        raise RegistryError(f"{origin.host} redirects to {target.host} without encryption; this is not followed")
    if target.host != origin.host and _private(target) and not _private(origin):
        raise RegistryError(
            f"{origin.host} redirects to {target.host}, an address of this machine or its network; this is not followed"
        )
    return target


class Challenge:
    """A `WWW-Authenticate: Bearer realm="…",service="…",scope="…"`."""

    def __init__(self, realm: httpx.URL, service: str, scopes: Iterable[str]) -> None:
        self.realm = realm
        self.service = service
        self.scopes = tuple(scopes)

    @classmethod
    def parse(cls, header: str, registry: httpx.URL) -> Challenge:
        """Raises RegistryError for a challenge that we can't answer, or whose realm is another host."""
        kind, _, rest = header.partition(" ")
        fields = dict(re.findall(r'([A-Za-z]+)="([^"]*)"', rest))
        if kind.lower() != "bearer" or "realm" not in fields:
            raise RegistryError(f"{registry.host} asks for a login of an unknown kind: {header[:200]!r}")
        try:
            realm = httpx.URL(fields["realm"])
        except httpx.InvalidURL:
            raise RegistryError(f"{registry.host} names a login server that is no address") from None
        if not same_host(realm, registry):
            # A signature for another host would let a registry use our key there.
            shown, original = realm.netloc.decode("ascii"), registry.netloc.decode("ascii")
            raise RegistryError(f'realm host "{shown}" does not match original host "{original}"')
        return cls(realm, fields.get("service", ""), fields.get("scope", "").split())


def _port(url: httpx.URL) -> int | None:
    return url.port or {"http": 80, "https": 443}.get(url.scheme)


def _private(url: httpx.URL) -> bool:
    """Whether a host is, or resolves to, an address that the open network does not reach."""
    try:
        return not ipaddress.ip_address(url.host).is_global
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(url.host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        # Behind a proxy names need not resolve here; what can't be resolved can't be reached directly either.
        return False
    return any(not ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_global for entry in found)
