"""Origins and hosts: who gets in and who gets 403."""

import httpx
import pytest
from starlette.responses import PlainTextResponse

from arriero.server.guard import Guard, Origins, default_origins, host_allowed, host_name, is_loopback


def client(*, host: str = "127.0.0.1:11434", listen: str = "127.0.0.1", origins: Origins | None = None):
    app = Guard(PlainTextResponse("in"), listen_host=listen, origins=origins or Origins())
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=f"http://{host}")


@pytest.mark.parametrize(
    "origin",
    [
        "http://localhost",
        "http://localhost:3000",
        "https://127.0.0.1:1",
        "http://0.0.0.0",
        "app://obsidian.md",
        "tauri://localhost",
        "vscode-webview://abc",
        "file://",
        "chrome-extension://xyz",
    ],
)
async def test_pages_of_this_machine_are_allowed_and_told_so(origin):
    async with client() as http:
        reply = await http.get("/", headers={"Origin": origin})
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == origin


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "http://localhost.evil.example", "https://127.0.0.1.evil.example:80", "null"]
)
async def test_other_pages_get_403(origin):
    async with client() as http:
        refused = await http.get("/", headers={"Origin": origin})
        assert (refused.status_code, "access-control-allow-origin" in refused.headers) == (403, False)
        assert repr(origin) in refused.json()["error"]
        assert "ARRIERO_ORIGINS" in refused.json()["error"]
        preflight = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        assert (await http.options("/", headers=preflight)).status_code == 403


async def test_an_added_pattern_opens_its_origins_only():
    async with client(origins=Origins(["https://*.example.com"])) as http:
        assert (await http.get("/", headers={"Origin": "https://a.example.com"})).status_code == 200
        assert (await http.get("/", headers={"Origin": "https://example.org"})).status_code == 403


async def test_a_star_opens_everything():
    async with client(origins=Origins(["*"])) as http:
        reply = await http.get("/", headers={"Origin": "https://any.example"})
    assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, "*")


async def test_a_preflight_is_answered_with_the_allowed_headers():
    async with client() as http:
        asked = {"Origin": "http://localhost:3000", "Access-Control-Request-Method": "POST"}
        reply = await http.options("/api/chat", headers=asked)
    assert reply.status_code == 204
    assert "x-stainless-retry-count" in reply.headers["access-control-allow-headers"]
    assert "DELETE" in reply.headers["access-control-allow-methods"]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:11434", 200),
        ("127.0.0.1", 200),
        ("[::1]:11434", 200),
        ("192.168.1.5", 200),
        ("box.local", 200),
        ("evil.example", 403),
        ("8.8.8.8", 403),
        ("localhost.evil.example", 403),
    ],
)
async def test_on_loopback_only_hosts_of_this_machine_are_served(host, status):
    async with client() as http:
        assert (await http.get("/", headers={"Host": host})).status_code == status


async def test_a_refused_host_is_told_why_in_the_shape_of_its_api():
    async with client(host="evil.example") as http:
        assert "'evil.example' is not a name of this machine" in (await http.get("/api/tags")).json()["error"]
        assert (await http.post("/v1/messages")).json()["error"]["type"] == "permission_error"


async def test_when_listening_everywhere_the_host_is_not_checked():
    async with client(listen="0.0.0.0") as http:
        assert (await http.get("/", headers={"Host": "my.example"})).status_code == 200


def test_the_machines_own_name_and_addresses_are_hosts_of_this_machine():
    known = {"own_name": "Workstation", "own_addresses": frozenset({"9.9.9.9"})}
    assert host_allowed("workstation:11434", **known)
    assert host_allowed("9.9.9.9:11434", **known)
    assert not host_allowed("9.9.9.8", **known)


def test_a_host_header_is_split_from_its_port():
    assert [host_name(text) for text in ("A:1", "[::1]:2", "::1", "a")] == ["a", "::1", "::1", "a"]


def test_only_loopback_addresses_count_as_loopback():
    assert [is_loopback(host) for host in ("localhost", "127.8.8.8", "::1", "0.0.0.0", "name")] == [True] * 3 + [
        False
    ] * 2


def test_default_origins_hold_each_local_host_with_and_without_port():
    assert {"http://localhost", "https://0.0.0.0:*"} <= set(default_origins())


async def test_a_page_may_read_the_requests_id():
    async with client() as http:
        reply = await http.get("/", headers={"Origin": "http://localhost:3000"})
    assert "request-id" in reply.headers["access-control-expose-headers"]
