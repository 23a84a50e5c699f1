"""Images by their addresses on every route: refused unless the server is told to fetch them, then as if sent along."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from arriero.server.fetch import FetchError
from tests.api.test_images import FIRST
from tests.helpers.seeing_server import OPTIONS, Seeing

HERE = "https://img.test/first.png"
DATA = base64.b64encode(FIRST).decode()


class Pictures:
    """In the place of the fetcher: one picture, and a note of what was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def fetch(self, address: str, limit: int) -> bytes:
        self.asked.append(address)
        if address != HERE:
            raise FetchError(f"'{address}' answers 404")
        assert limit > len(FIRST)
        return FIRST


@pytest.fixture
def pictures(seeing: Seeing) -> Iterator[Pictures]:
    """What is fetched from while a server fetches."""
    state, made = seeing.server.app.state, Pictures()
    usual = state.services
    state.services = replace(usual, fetcher=made, settings=replace(usual.settings, fetch_images=True))
    yield made
    state.services = usual


def openai_part(address: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": address, "detail": "low"}}


TEXT = {"type": "text", "text": "what?"}
ROUTES: dict[str, Any] = {
    "/api/chat": lambda at: {"stream": False, "messages": [{"role": "user", "content": "what?", "images": [at]}]},
    "/api/generate": lambda at: {"stream": False, "prompt": "what?", "images": [at]},
    "/v1/chat/completions": lambda at: {"messages": [{"role": "user", "content": [openai_part(at), TEXT]}]},
    "/v1/responses": lambda at: {
        "input": [
            {
                "role": "user",
                "content": [{"type": "input_image", "image_url": at}, {"type": "input_text", "text": "what?"}],
            }
        ]
    },
    "/v1/messages": lambda at: {
        "max_tokens": 12,
        "messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": at}}, TEXT]}],
    },
}


def tokens_and_text(seeing: Seeing, path: str, body: dict[str, Any]) -> tuple[int, str]:
    reply = seeing.http.post(path, json={"model": "seeing", "options": OPTIONS} | body)
    assert reply.status_code == 200, reply.text
    found = reply.json()
    if path == "/api/chat":
        return found["prompt_eval_count"], found["message"]["content"]
    if path == "/api/generate":
        return found["prompt_eval_count"], found["response"]
    if path == "/v1/chat/completions":
        return found["usage"]["prompt_tokens"], found["choices"][0]["message"]["content"]
    if path == "/v1/responses":
        return found["usage"]["input_tokens"], found["output"][0]["content"][0]["text"]
    usage = found["usage"]
    return usage["input_tokens"] + usage["cache_read_input_tokens"], found["content"][0]["text"]


@pytest.mark.parametrize("path", ROUTES)
def test_a_fetched_image_is_one_that_was_sent(seeing: Seeing, pictures: Pictures, path: str) -> None:
    sent = tokens_and_text(seeing, "/api/chat", ROUTES["/api/chat"](DATA))
    assert tokens_and_text(seeing, path, ROUTES[path](HERE)) == sent
    assert pictures.asked == [HERE]


@pytest.mark.parametrize("path", ROUTES)
def test_what_can_not_be_fetched_is_a_400_that_says_why(seeing: Seeing, pictures: Pictures, path: str) -> None:
    reply = seeing.http.post(path, json={"model": "seeing"} | ROUTES[path]("https://img.test/none.png"))
    assert (reply.status_code, "answers 404" in reply.text) == (400, True)


@pytest.mark.parametrize("path", ROUTES)
def test_nothing_is_fetched_unless_the_server_is_told_to(seeing: Seeing, path: str) -> None:
    reply = seeing.http.post(path, json={"model": "seeing"} | ROUTES[path](HERE))
    assert (reply.status_code, "ARRIERO_FETCH_IMAGES" in reply.text) == (400, True)


@pytest.mark.parametrize("path", ROUTES)
def test_nothing_is_fetched_for_a_model_that_can_not_see(seeing: Seeing, pictures: Pictures, path: str) -> None:
    reply = seeing.http.post(path, json={"model": "blind"} | ROUTES[path](HERE))
    assert (reply.status_code, "does not support images" in reply.text) == (400, True)
    assert pictures.asked == []


@pytest.mark.parametrize("path", ["/v1/messages/count_tokens", "/v1/responses/input_tokens"])
def test_images_are_counted_where_tokens_are(seeing: Seeing, pictures: Pictures, path: str) -> None:
    route = path.rpartition("/")[0]
    body = {"model": "seeing"} | ROUTES[route](HERE)
    body.pop("max_tokens", None)
    reply = seeing.http.post(path, json=body)
    assert reply.json()["input_tokens"] == tokens_and_text(seeing, "/api/chat", ROUTES["/api/chat"](DATA))[0]


def test_one_address_is_fetched_once_and_many_are_refused(seeing: Seeing, pictures: Pictures) -> None:
    parts = [openai_part(HERE)] * 3
    body = {"model": "seeing", "options": OPTIONS, "messages": [{"role": "user", "content": parts}]}
    assert seeing.http.post("/v1/chat/completions", json=body).status_code == 200
    assert pictures.asked == [HERE]
    many = [f"{HERE}?{number}" for number in range(33)]
    reply = seeing.http.post(
        "/api/chat", json={"model": "seeing", "messages": [{"role": "user", "content": "", "images": many}]}
    )
    assert (reply.status_code, "at most 32" in reply.text) == (400, True)


def test_all_images_of_a_request_have_the_room_of_one_body(seeing: Seeing, pictures: Pictures) -> None:
    state = seeing.server.app.state
    state.services = replace(state.services, settings=replace(state.services.settings, max_body=len(FIRST) * 2 + 400))
    limits: list[int] = []

    async def fetch(_address: str, limit: int) -> bytes:
        limits.append(limit)
        return FIRST

    pictures.fetch = fetch  # type: ignore[method-assign]
    images = [HERE, f"{HERE}?2"]
    body = {"model": "seeing", "stream": False, "options": OPTIONS}
    seeing.http.post("/api/chat", json=body | {"messages": [{"role": "user", "content": "?", "images": images}]})
    assert limits == [len(FIRST) * 2 + 400, len(FIRST) + 400]


def test_images_in_the_results_of_tools_are_fetched(seeing: Seeing, pictures: Pictures) -> None:
    result = {
        "type": "tool_result",
        "tool_use_id": "t1",
        "content": [{"type": "image", "source": {"type": "url", "url": HERE}}],
    }
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    body = {
        "model": "seeing",
        "max_tokens": 4,
        "messages": [
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ],
    }
    seeing.http.post("/v1/messages", json=body)
    assert pictures.asked == [HERE]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_parts_inside_parts_without_end_are_a_400(seeing: Seeing, path: str) -> None:
    part: Any = TEXT
    for _ in range(300):
        part = {"content": [part]}
    turns = {"input" if path == "/v1/responses" else "messages": [{"role": "user", "content": [part]}]}
    reply = seeing.http.post(path, json={"model": "seeing", "max_tokens": 12} | turns)
    assert (reply.status_code, "type must be a string" in reply.text) == (400, True)
