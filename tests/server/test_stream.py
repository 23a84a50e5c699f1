"""Streams: status before the first piece, an error line after it, and everything closed when the client leaves."""

import asyncio

import pytest

from arriero.errors import Cancelled, InvalidRequest
from arriero.server.stream import ndjson, while_connected

SCOPE = {"type": "http", "method": "POST", "path": "/x"}


async def never_leaves():
    await asyncio.Event().wait()


async def sent_by(response, receive=never_leaves):
    sent = []

    async def send(message):
        sent.append(message)

    await response(SCOPE, receive, send)
    return sent


def body(sent) -> bytes:
    return b"".join(message.get("body", b"") for message in sent)


async def test_each_object_is_a_line_sent_on_its_own():
    async def objects():
        yield {"a": 1}
        yield {"b": "é"}

    sent = await sent_by(ndjson(objects()))
    assert [message.get("body") for message in sent[1:]] == [b'{"a":1}\n', '{"b":"é"}\n'.encode(), b""]
    assert dict(sent[0]["headers"])[b"content-type"] == b"application/x-ndjson"


async def test_an_error_before_the_first_object_has_its_status():
    async def objects():
        raise InvalidRequest("no")
        yield

    sent = await sent_by(ndjson(objects()))
    assert sent[0]["status"] == 400
    assert body(sent) == b'{"error":"no"}'


async def test_an_error_after_the_first_object_is_a_last_line():
    async def objects():
        yield {"a": 1}
        raise ZeroDivisionError("secret")

    sent = await sent_by(ndjson(objects()))
    lines = body(sent).splitlines()
    assert sent[0]["status"] == 200
    assert lines[0] == b'{"a":1}'
    assert lines[1].startswith(b'{"error":"internal error')
    assert b"secret" not in lines[1]
    assert sent[-1]["more_body"] is False


async def test_the_generator_is_closed_when_the_client_leaves():
    closed, started = asyncio.Event(), asyncio.Event()

    async def objects():
        try:
            yield {"a": 1}
            started.set()
            await asyncio.Event().wait()
        finally:
            closed.set()

    async def leaves():
        await started.wait()
        return {"type": "http.disconnect"}

    await asyncio.wait_for(sent_by(ndjson(objects()), leaves), 5)
    assert closed.is_set()


async def test_the_generator_is_closed_when_the_client_leaves_while_a_piece_is_being_sent():
    closed, sending = asyncio.Event(), asyncio.Event()

    async def objects():
        try:
            yield {"a": 1}
        finally:
            closed.set()

    async def send(message):
        if message["type"] == "http.response.body":
            sending.set()
            await asyncio.Event().wait()

    async def leaves():
        await sending.wait()
        return {"type": "http.disconnect"}

    await asyncio.wait_for(ndjson(objects())(SCOPE, leaves, send), 5)
    assert closed.is_set()


async def test_work_is_cancelled_when_the_client_leaves():
    cancelled = asyncio.Event()

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def leaves():
        return {"type": "http.disconnect"}

    with pytest.raises(Cancelled):
        await while_connected(leaves, work())
    assert cancelled.is_set()


async def test_the_result_or_error_of_work_comes_through():
    async def fails():
        raise InvalidRequest("no")

    async def works():
        return 7

    assert await while_connected(never_leaves, works()) == 7
    with pytest.raises(InvalidRequest):
        await while_connected(never_leaves, fails())
