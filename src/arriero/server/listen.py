"""Binding the server's address, and saying what sits there already when it can't be bound."""

from __future__ import annotations

import errno
import socket

import httpx

from arriero.errors import ArrieroError


class AddressInUse(ArrieroError):
    """The server's address is taken; the message says by what and how to choose another."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; AddressInUse when something is there, ArrieroError when the address can't be ours."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ArrieroError(f"cannot listen on '{host}': {error.strerror}; set ARRIERO_HOST to another") from None
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(2048)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(_in_use(host, port)) from None
        raise ArrieroError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return sock


def who_answers(host: str, port: int) -> str:
    """What serves an address, in words: `arriero`, `Ollama`, `another HTTP server` or `another program`."""
    target = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    base = f"http://[{target}]:{port}" if ":" in target else f"http://{target}:{port}"
    try:
        with httpx.Client(timeout=2.0, trust_env=False) as client:
            reply = client.get(f"{base}/")
    except httpx.HTTPError:
        return "another program"
    if reply.headers.get("server", "").lower().startswith("arriero"):
        return "arriero"
    return "Ollama" if "ollama is running" in reply.text[:200].lower() else "another HTTP server"


def _in_use(host: str, port: int) -> str:
    who = who_answers(host, port)
    other = f"choose another address, for example ARRIERO_HOST={host}:{port + 1 if port < 65535 else 0}"
    if who == "arriero":
        return f"arriero already serves {host}:{port}; to run a second one {other}"
    if who == "Ollama":
        return f"Ollama already serves {host}:{port}; stop it, or {other}"
    return f"{host}:{port} is taken by {who}; {other}"
