"""Transfers that several clients follow: joining late, leaving, coming back."""

import asyncio
import threading
from contextlib import aclosing

import pytest

from arriero.errors import Cancelled, RegistryError
from arriero.server.transfers import Transfers


class Scripted:
    """Work that goes on when the test says."""

    def __init__(self, error=None):
        self.go = threading.Event()
        self.runs = 0
        self.error = error

    def __call__(self, report, stop):
        self.runs += 1
        report({"status": "begun", "digest": "d", "completed": 1})
        report({"status": "begun", "digest": "d", "completed": 2})
        while not self.go.wait(0.005):
            if stop.is_set():
                raise Cancelled("given up")
        if self.error:
            raise self.error
        report({"status": "success"})


async def all_of(statuses):
    return [status async for status in statuses]


async def first_of(statuses):
    async for status in statuses:
        if status.get("completed") == 2:
            return


async def test_one_who_joins_late_hears_where_every_bar_stands():
    transfers, work = Transfers(), Scripted()
    first = transfers.follow("k", "the pull", work)
    await first_of(first)
    late = asyncio.ensure_future(all_of(transfers.follow("k", "the pull", work)))
    await asyncio.sleep(0.02)
    work.go.set()
    assert await late == [{"status": "begun", "digest": "d", "completed": 2}, {"status": "success"}]
    assert await all_of(first) == [{"status": "success"}]
    assert work.runs == 1


async def test_a_failure_reaches_all_and_the_next_begins_anew():
    transfers, work = Transfers(), Scripted(RegistryError("it failed"))
    both = [asyncio.ensure_future(all_of(transfers.follow("k", "the pull", work))) for _ in range(2)]
    await asyncio.sleep(0.02)
    work.go.set()
    for one in both:
        with pytest.raises(RegistryError, match="it failed"):
            await one
    with pytest.raises(RegistryError):
        await all_of(transfers.follow("k", "the pull", work))
    assert work.runs == 2


async def test_one_who_comes_back_at_once_gets_a_transfer_of_its_own():
    transfers, work = Transfers(), Scripted()
    async with aclosing(transfers.follow("k", "the pull", work)) as statuses:
        await first_of(statuses)
    again = asyncio.ensure_future(all_of(transfers.follow("k", "the pull", work)))
    while work.runs < 2:
        await asyncio.sleep(0.005)
    work.go.set()
    assert (await again)[-1] == {"status": "success"}


async def test_closing_ends_what_is_under_way():
    transfers, work = Transfers(), Scripted()
    following = asyncio.ensure_future(all_of(transfers.follow("k", "the pull", work)))
    await asyncio.sleep(0.02)
    await asyncio.wait_for(transfers.close(), 5)
    with pytest.raises(Cancelled):
        await following
