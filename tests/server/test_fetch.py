"""Fetching what a request names: nothing but public addresses, checked once and kept, within limits."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from arriero.server import fetch
from arriero.server.fetch import Fetcher, FetchError, is_elsewhere, is_public

DATA = b"\x89PNG" + bytes(range(256))


class Site:
    """A small web server on loopback: `answers` holds status, headers and body by path."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.asked: list[tuple[str, str]] = []
        self.answers: dict[str, tuple[int, dict[str, str], bytes]] = {
            "/a.png": (200, {"Content-Type": "image/png"}, DATA)
        }
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.asked.append((self.headers["Host"], self.path))
                status, headers, body = site.answers.get(self.path.partition("?")[0], (404, {}, b""))
                self.send_response(status)
                for name, text in headers.items():
                    self.send_header(name, text)
                self.end_headers()
                for start in range(0, len(body), 64):
                    self.wfile.write(body[start : start + 64])
                    if "X-Slow" in headers:
                        time.sleep(0.1)

            def log_message(self, *_: Any) -> None:
                return

            def handle_error(self) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None  # type: ignore[method-assign]
        if context is not None:
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.port: int = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    yield made
    made.close()


class Names:
    """A look-up by a table, which says how often it was asked."""

    def __init__(self, **table: list[str]) -> None:
        self.table = {name.replace("_", "."): addresses for name, addresses in table.items()}
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        if host not in self.table:
            raise OSError("Name or service not known")
        return self.table[host]


def fetcher(names: Names, **changes: Any) -> Fetcher:
    """One for which 127.0.0.1 is public, and 127.0.0.2 is not."""
    given: dict[str, Any] = {"allowed": lambda ip: str(ip) == "127.0.0.1", "ports": None, "resolve": names}
    return Fetcher(**given | changes)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0"),
        *("255.255.255.255", "224.0.0.1", "192.0.2.1", "198.18.0.1", "240.0.0.1"),
        *("::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1", "ff02::1", "2001:db8::1"),
        *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1"),
        *("192.0.0.192", "168.63.129.16", "192.88.99.1", "::ffff:168.63.129.16", "fec0::1", "3fff::1"),
        *("64:ff9b::7f00:1", "64:ff9b::a00:1", "64:ff9b:1::1", "2002:7f00:1::", "2002:a00:1::1", "2001:0:1::1"),
    ],
)
def test_an_address_that_is_not_public_is_told(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_a_public_address_is_told(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


def test_a_public_address_of_this_machine_itself_is_not_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "own_addresses", lambda: frozenset(("8.8.8.8", "2606:4700:4700::1111")))
    asked = ["8.8.8.8", "::ffff:8.8.8.8", "2606:4700:4700:0::1111", "8.8.4.4", "127.0.0.1"]
    assert [is_elsewhere(ipaddress.ip_address(one)) for one in asked] == [False, False, False, True, False]


async def test_a_server_fetches_nothing_from_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "own_addresses", lambda: frozenset(("8.8.8.8",)))
    with pytest.raises(FetchError, match="not on the public internet, or this machine"):
        await Fetcher().fetch("http://8.8.8.8/a.png", 1000)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "2130706433", "0x7f.1", "127.1", "0177.0.0.1", "localhost", "[::1]", "[::ffff:7f00:1]"]
)
async def test_no_spelling_of_this_machine_is_fetched_from(site: Site, host: str) -> None:
    with pytest.raises(FetchError, match=r"not on the public internet|has no address|is no address"):
        await Fetcher(ports=None).fetch(f"http://{host}:{site.port}/a.png", 1000)
    assert site.asked == []


async def test_the_bytes_of_a_public_host_come_and_it_hears_its_own_name(site: Site) -> None:
    names = Names(img_test=["127.0.0.1"])
    assert await fetcher(names).fetch(f"http://img.test:{site.port}/a.png?key=1#x", len(DATA)) == DATA
    assert site.asked == [(f"img.test:{site.port}", "/a.png?key=1")]
    # Looked up once: a second answer could be another.
    assert names.asked == ["img.test"]


async def test_one_address_that_is_not_public_among_others_is_enough_to_refuse(site: Site) -> None:
    names = Names(img_test=["127.0.0.1", "127.0.0.2"])
    with pytest.raises(FetchError, match="not on the public internet"):
        await fetcher(names).fetch(f"http://img.test:{site.port}/a.png", 1000)
    assert site.asked == []


@pytest.mark.parametrize(
    ("to", "words"),
    [
        ("http://inner.test:{port}/a.png", "not on the public internet"),
        ("http://127.0.0.2:{port}/a.png", "not on the public internet"),
        ("//inner.test:{port}/a.png", "not on the public internet"),
        ("file:///etc/passwd", "only http and https"),
        ("ftp://img.test/a.png", "only http and https"),
        ("gopher://img.test/", "only http and https"),
        ("http://user:pass@img.test:{port}/a.png", "password"),
        ("/loop", "more than 4 times"),
    ],
)
async def test_each_redirect_is_checked_anew(site: Site, to: str, words: str) -> None:
    names = Names(img_test=["127.0.0.1"], inner_test=["127.0.0.2"], **{"127_0_0_2": ["127.0.0.2"]})
    site.answers["/loop"] = (302, {"Location": to.format(port=site.port)}, b"")
    with pytest.raises(FetchError, match=words):
        await fetcher(names).fetch(f"http://img.test:{site.port}/loop", 1000)
    assert all(path == "/loop" for _, path in site.asked)


async def test_a_redirect_to_a_public_host_is_followed(site: Site) -> None:
    names = Names(img_test=["127.0.0.1"], cdn_test=["127.0.0.1"])
    site.answers["/old"] = (301, {"Location": f"http://cdn.test:{site.port}/a.png"}, b"")
    assert await fetcher(names).fetch(f"http://img.test:{site.port}/old", 1000) == DATA
    assert [host.partition(":")[0] for host, _ in site.asked] == ["img.test", "cdn.test"]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((200, {"Content-Type": "text/html"}, b"<html>"), "is no image"),
        ((200, {"Content-Type": "image/png", "Content-Encoding": "gzip"}, b"x"), "compressed"),
        ((200, {"Content-Type": "image/png", "Content-Length": "2000"}, b""), "larger than 1000 bytes"),
        ((200, {"Content-Type": "image/png"}, b"x" * 5000), "larger than 1000 bytes"),
        ((200, {"Content-Type": "image/png", "X-Slow": "1"}, b"x" * 900), "did not come within 0.5 s"),
        ((200, {"Content-Type": "image/png", "Content-Length": "900"}, b"x" * 10), "cannot be fetched"),
        ((404, {"Content-Type": "image/png"}, b"x"), "answers 404"),
        ((304, {}, b""), "answers 304"),
    ],
)
async def test_what_is_no_image_of_bounded_size_and_time_is_refused(
    site: Site, answer: tuple[int, dict[str, str], bytes], words: str
) -> None:
    site.answers["/b"] = answer
    seconds = 0.5 if "X-Slow" in answer[1] else 20.0
    with pytest.raises(FetchError, match=words) as caught:
        await fetcher(Names(img_test=["127.0.0.1"]), seconds=seconds).fetch(
            f"http://img.test:{site.port}/b?secret", 1000
        )
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "address", ["http://", "http:///a.png", "https://[::1", "http://a b/", "http://\x00/", "http://img.test:99999/"]
)
async def test_what_is_no_address_is_said_so(address: str) -> None:
    with pytest.raises(FetchError):
        await fetcher(Names()).fetch(address, 1000)


async def test_other_ports_than_those_of_the_web_are_refused() -> None:
    names = Names(img_test=["127.0.0.1"])
    with pytest.raises(FetchError, match="80 and 443"):
        await fetcher(names, ports=frozenset((80, 443))).fetch("http://img.test:6379/", 1000)
    assert names.asked == []


async def test_proxies_of_the_environment_are_not_used(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert await fetcher(Names(img_test=["127.0.0.1"])).fetch(f"http://img.test:{site.port}/a.png", 1000) == DATA


def certificate(folder: Path, name: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's context with a certificate for a name, and a client's that trusts it."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    today = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(today - datetime.timedelta(days=1))
        .not_valid_after(today + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = made.public_bytes(serialization.Encoding.PEM)
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "both.pem").write_bytes(pem + secret)
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(folder / "both.pem")
    return serving, ssl.create_default_context(cadata=pem.decode())


async def test_the_certificate_must_be_that_of_the_name(tmp_path: Path) -> None:
    serving, trusting = certificate(tmp_path, "img.test")
    site = Site(serving)
    try:
        names = Names(img_test=["127.0.0.1"], other_test=["127.0.0.1"])
        made = fetcher(names, trust=trusting)
        assert await made.fetch(f"https://img.test:{site.port}/a.png", 1000) == DATA
        with pytest.raises(FetchError, match="CERTIFICATE_VERIFY_FAILED"):
            await made.fetch(f"https://other.test:{site.port}/a.png", 1000)
        site.answers["/down"] = (302, {"Location": f"http://img.test:{site.port}/a.png"}, b"")
        with pytest.raises(FetchError, match="not encrypted"):
            await made.fetch(f"https://img.test:{site.port}/down", 1000)
    finally:
        site.close()
