"""Streams of events: framing, and signs of life while nothing comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from arriero.server.compat.sse import alive, event


def test_an_event_is_a_name_a_line_of_json_and_a_blank_line() -> None:
    assert event({"a": "é\n"}, "name") == 'event: name\ndata: {"a":"é\\n"}\n\n'.encode()
    assert event([1]) == b"data: [1]\n\n"


async def slow(closed: list[str], gate: asyncio.Event) -> AsyncGenerator[bytes, None]:
    try:
        yield b"first"
        await gate.wait()
        yield b"second"
    finally:
        closed.append("closed")


async def test_signs_come_only_while_nothing_else_does() -> None:
    closed: list[str] = []
    gate, found = asyncio.Event(), []
    async for piece in alive(slow(closed, gate), lambda: b"sign", 0.01):
        found.append(piece)
        if found.count(b"sign") == 3:
            gate.set()
    assert found[0] == b"first"
    assert found[-1] == b"second"
    assert set(found[1:-1]) == {b"sign"}
    assert closed == ["closed"]


async def test_leaving_in_the_silence_closes_what_is_waited_for() -> None:
    closed: list[str] = []
    pieces = alive(slow(closed, asyncio.Event()), lambda: b"sign", 0.01)
    async with aclosing(pieces):
        async for piece in pieces:
            if piece == b"sign":
                break
    assert closed == ["closed"]


async def test_being_cancelled_in_the_silence_closes_what_is_waited_for() -> None:
    closed: list[str] = []

    async def read() -> None:
        pieces = alive(slow(closed, asyncio.Event()), lambda: b"sign", 60)
        async with aclosing(pieces):
            async for _ in pieces:
                continue

    task = asyncio.ensure_future(read())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert closed == ["closed"]


async def test_an_error_comes_through() -> None:
    async def broken() -> AsyncGenerator[bytes, None]:
        yield b"first"
        raise ValueError("broken")

    pieces = alive(broken(), lambda: b"sign", 1)
    assert await anext(pieces) == b"first"
    with pytest.raises(ValueError, match="broken"):
        await anext(pieces)
