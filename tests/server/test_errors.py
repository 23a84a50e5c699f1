"""Errors → statuses and bodies."""

import json
import logging

import httpx
import pytest

from arriero import errors
from arriero.server.access import AccessLog
from arriero.server.errors import BodyTooLarge, error_response, status_of


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (errors.InvalidRequest, 400),
        (errors.PromptTooLong, 400),
        (errors.TemplateError, 400),
        (errors.ModelfileError, 400),
        (errors.Forbidden, 403),
        (errors.NotFound, 404),
        (BodyTooLarge, 413),
        (errors.Cancelled, 499),
        (errors.OutOfMemory, 500),
        (errors.CheckpointError, 500),
        (errors.RunnerCrashed, 500),
        (errors.StoreError, 500),
        (errors.ServerBusy, 503),
        (ZeroDivisionError, 500),
    ],
)
def test_each_class_has_its_status(kind, status):
    assert status_of(kind("x")) == status


def test_an_unexpected_error_shows_its_class_and_nothing_else():
    body = json.loads(error_response(ValueError("/secret/path")).body)
    assert "ValueError" in body["error"]
    assert "secret" not in body["error"]


async def test_a_bug_in_a_route_is_a_clean_500_and_a_traceback_in_the_log(caplog):
    async def broken(_scope, _receive, _send):
        raise ZeroDivisionError("bug")

    async with httpx.AsyncClient(transport=httpx.ASGITransport(AccessLog(broken)), base_url="http://x") as http:
        with caplog.at_level(logging.INFO):
            reply = await http.get("/path")
    assert reply.status_code == 500
    assert reply.headers["content-type"] == "application/json; charset=utf-8"
    assert "Traceback" in caplog.text
    assert "GET /path 500" in caplog.text


async def test_every_request_is_one_line_in_the_log(caplog):
    async def quiet(_scope, _receive, send):
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async with httpx.AsyncClient(transport=httpx.ASGITransport(AccessLog(quiet)), base_url="http://x") as http:
        with caplog.at_level(logging.INFO, "arriero.server.access"):
            await http.post("/a")
    lines = [record.getMessage() for record in caplog.records if record.name == "arriero.server.access"]
    assert len(lines) == 1
    assert lines[0].startswith("POST /a 204 ")


async def test_no_path_can_forge_a_line_of_the_log(caplog):
    async def broken(_scope, _receive, _send):
        raise ZeroDivisionError("bug")

    async with httpx.AsyncClient(transport=httpx.ASGITransport(AccessLog(broken)), base_url="http://x") as http:
        with caplog.at_level(logging.INFO):
            await http.get("/a%0AINFO all is well")
    assert [record.getMessage() for record in caplog.records if "\n" in record.getMessage()] == []
    assert "GET /a%0AINFO%20all%20is%20well 500" in caplog.text


@pytest.mark.parametrize(
    ("client", "shown"), [("10.0.0.7", "10.0.0.7"), ("::1", "::1"), ("6.6.6.6 200 0.1s", "-"), ("me", "-"), (None, "-")]
)
async def test_no_name_of_a_client_can_forge_a_line_of_the_log(caplog, client, shown):
    """A proxy on this machine may name whom it asks for."""

    async def quiet(_scope, _receive, send):
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    transport = httpx.ASGITransport(AccessLog(quiet), client=(client, 1) if client else None)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
        with caplog.at_level(logging.INFO, "arriero.server.access"):
            await http.get("/a", headers={"x-request-id": "id"})
    assert caplog.messages[-1].split("s ", 1)[1] == f"{shown} id"
