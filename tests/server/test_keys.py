"""The API key: who is let in, who is told what."""

import httpx
import pytest
from starlette.responses import PlainTextResponse

from arriero.server.access import AccessLog
from arriero.server.keys import KeyCheck


def client(*keys: str) -> httpx.AsyncClient:
    app = AccessLog(KeyCheck(PlainTextResponse("in"), keys=keys))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer secret"},
        {"authorization": "bearer  secret "},
        {"x-api-key": "secret"},
        {"X-Api-Key": " other"},
        {"Authorization": "Bearer wrong", "x-api-key": "secret"},
    ],
)
async def test_either_header_with_any_of_the_keys_opens(headers: dict[str, str]) -> None:
    async with client("secret", "other") as http:
        assert (await http.get("/api/tags", headers=headers)).text == "in"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "secret"},
        {"Authorization": "Basic secret"},
        {"Authorization": "Bearer secret2"},
        {"Authorization": "Bearer"},
        {"x-api-key": ""},
        {"x-api-key": "secre"},
        {"api-key": "secret"},
    ],
)
async def test_anything_else_is_a_401_that_says_what_to_send(headers: dict[str, str]) -> None:
    async with client("secret") as http:
        reply = await http.post("/api/chat", headers=headers)
    assert reply.status_code == 401
    assert "ARRIERO_API_KEY" in reply.json()["error"]
    assert reply.headers["www-authenticate"] == "Bearer"
    assert "secre" not in reply.text


async def test_a_key_of_any_letters_opens() -> None:
    async with client("schlüssel-鍵") as http:
        sent = {"authorization": b"Bearer " + "schlüssel-鍵".encode()}
        assert (await http.get("/api/tags", headers=sent)).text == "in"
        assert (await http.get("/api/tags", headers={"authorization": b"Bearer \xff"})).status_code == 401


async def test_the_heartbeat_needs_no_key_and_without_keys_nothing_does() -> None:
    async with client("secret") as http:
        assert (await http.get("/")).text == "in"
        assert (await http.get("/api/version")).status_code == 401
    async with client() as http:
        assert (await http.get("/api/tags")).text == "in"


async def test_each_api_is_refused_in_its_own_shape() -> None:
    async with client("secret") as http:
        of_openai = (await http.post("/v1/chat/completions")).json()["error"]
        of_anthropic = (await http.post("/v1/messages")).json()
    assert (of_openai["type"], of_openai["code"]) == ("authentication_error", "invalid_api_key")
    assert (of_anthropic["type"], of_anthropic["error"]["type"]) == ("error", "authentication_error")
    assert of_anthropic["request_id"].startswith("req_")
