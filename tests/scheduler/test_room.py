"""Room: who leaves for whom, in which order, and what a context may take."""

from __future__ import annotations

import asyncio
import math

import pytest

from arriero.errors import OutOfMemory
from tests.helpers.scripted_runner import Reply, Script, received
from tests.scheduler.conftest import alive, answer, load_request, starts, submit, until


async def test_at_the_model_limit_the_idle_model_with_the_shortest_session_leaves(make):
    scheduler = make(max_loaded_models=2)
    async with await scheduler.lease(load_request("a"), keep_alive=100.0):
        pass
    async with await scheduler.lease(load_request("b"), keep_alive=50.0):
        pass
    async with await scheduler.lease(load_request("c")):
        assert {model.key for model in scheduler.loaded()} == {"a", "c"}


async def test_a_model_kept_for_ever_still_makes_room_when_it_is_idle(make):
    scheduler = make(max_loaded_models=1)
    async with await scheduler.lease(load_request("a"), keep_alive=math.inf):
        pass
    async with await scheduler.lease(load_request("b")):
        assert [model.key for model in scheduler.loaded()] == ["b"]


async def test_a_second_model_waits_for_the_requests_of_a_busy_one_and_then_replaces_it(make):
    """R02: promised bytes count, so 60 and 50 never sit beside each other under 100."""
    scheduler = make(Script(weight_bytes=60, cache_bytes_per_token=0), memory=lambda: 100)
    first = await scheduler.lease(load_request("a", weight=60))
    second = asyncio.create_task(scheduler.lease(load_request("b", weight=50)))
    await asyncio.sleep(0.2)
    assert not second.done()
    assert scheduler.reserved_bytes == 60
    first.release()
    async with await asyncio.wait_for(second, 10):
        assert [model.key for model in scheduler.loaded()] == ["b"]
        assert scheduler.reserved_bytes <= 100


async def test_no_second_model_is_sent_away_while_the_first_is_still_going(make):
    scheduler = make(Script(weight_bytes=40), memory=lambda: 100)
    for key in "ab":
        (await scheduler.lease(load_request(key, weight=40))).release()
    third = asyncio.create_task(scheduler.lease(load_request("c", weight=40)))
    await until(lambda: "a" not in scheduler._entries)
    scheduler._loader.notify()
    (await asyncio.wait_for(third, 10)).release()
    assert {model.key for model in scheduler.loaded()} == {"b", "c"}


async def test_a_small_model_does_not_overtake_the_large_one_that_waits_before_it(make):
    # Every runner turns out to hold 30, so that no load outgrows what it was let in for and has to wait again.
    scheduler = make(Script(weight_bytes=30), memory=lambda: 80)
    first = await scheduler.lease(load_request("a", weight=60))
    large = asyncio.create_task(scheduler.lease(load_request("b", weight=60)))
    small = asyncio.create_task(scheduler.lease(load_request("c", weight=30)))
    await until(lambda: len(scheduler.loaded()) == 3)
    await asyncio.sleep(0.05)
    assert {model.key: model.state for model in scheduler.loaded()} == {"a": "ready", "b": "queued", "c": "queued"}
    first.release()
    (await asyncio.wait_for(large, 10)).release()
    (await asyncio.wait_for(small, 10)).release()


async def test_a_model_that_falls_idle_makes_room_while_a_busy_one_still_drains(make):
    scheduler = make(Script(weight_bytes=40), memory=lambda: 100)
    draining = await scheduler.lease(load_request("a", weight=40))
    other = await scheduler.lease(load_request("b", weight=40))
    third = asyncio.create_task(scheduler.lease(load_request("c", weight=60)))
    await until(lambda: "a" not in scheduler._entries)
    other.release()
    (await asyncio.wait_for(third, 10)).release()
    draining.release()


async def test_an_idle_model_leaves_before_the_second_one_loads(make, tmp_path):
    log = tmp_path / "log"
    scheduler = make(Script(weight_bytes=60, log=str(log)), memory=lambda: 100)
    async with await scheduler.lease(load_request("a", weight=60)):
        pass
    async with await scheduler.lease(load_request("b", weight=50)):
        first, second = starts(log)
        assert not alive(first)
        assert alive(second)


async def test_new_requests_for_a_busy_model_do_not_starve_the_one_that_waits(make):
    scheduler = make(Script(weight_bytes=60), memory=lambda: 100)
    first = await scheduler.lease(load_request("a", weight=60))
    second = asyncio.create_task(scheduler.lease(load_request("b", weight=60)))
    await asyncio.sleep(0.05)
    third = asyncio.create_task(scheduler.lease(load_request("a", weight=60)))
    await asyncio.sleep(0.05)
    first.release()
    lease = await asyncio.wait_for(second, 10)
    assert not third.done()
    lease.release()
    (await asyncio.wait_for(third, 10)).release()


async def test_a_model_larger_than_the_limit_is_refused_with_both_figures_until_it_fits(make):
    """R03: a refusal reads the limit of that moment and leaves nothing behind."""
    limit = [1 << 30]
    scheduler = make(Script(weight_bytes=3 << 30), memory=lambda: limit[0])
    for _ in range(100):
        with pytest.raises(OutOfMemory, match=r"3\.0 GiB.*1\.0 GiB"):
            await scheduler.lease(load_request(weight=3 << 30))
    limit[0] = 2 << 30
    with pytest.raises(OutOfMemory, match=r"3\.0 GiB.*2\.0 GiB"):
        await scheduler.lease(load_request(weight=3 << 30))
    limit[0] = 4 << 30
    async with await scheduler.lease(load_request(weight=3 << 30)):
        assert scheduler.reserved_bytes == 3 << 30


async def test_a_context_that_does_not_fit_is_refused_once_the_figures_are_known(make, tmp_path):
    log = tmp_path / "log"
    script = Script(weight_bytes=1000, cache_bytes_per_token=10, log=str(log))
    scheduler = make(script, memory=lambda: 20_000)
    with pytest.raises(OutOfMemory):
        await scheduler.lease(load_request(context=4096))
    async with await scheduler.lease(load_request(context=1024)) as lease:
        assert lease.context_length == 1024
    assert len(starts(log)) == 2


async def test_a_request_for_a_longer_context_grows_a_loaded_model(make, tmp_path):
    log = tmp_path / "log"
    scheduler = make(Script(weight_bytes=1000, cache_bytes_per_token=10, log=str(log)), memory=lambda: 30_000)
    async with await scheduler.lease(load_request(context=512)) as lease:
        assert lease.context_length == 512
    async with await scheduler.lease(load_request(context=2048)) as lease:
        assert lease.context_length == 2048
        await answer(lease, submit("1"))
    with pytest.raises(OutOfMemory):
        await scheduler.lease(load_request(context=4096))
    async with await scheduler.lease(load_request(context=512)) as lease:
        assert lease.context_length == 512
    limits = [message for message in received(log) if message["type"] == "limit"]
    assert len(starts(log)) == 1
    assert limits[-1]["context_length"] == 2048
    assert limits[-1]["cache_bytes"] >= 20_480


async def test_an_idle_model_makes_room_for_a_longer_context_of_another(make):
    scheduler = make(Script(weight_bytes=1000, cache_bytes_per_token=1), memory=lambda: 4500)
    for key in "ab":
        (await scheduler.lease(load_request(key, context=512))).release()
    async with await scheduler.lease(load_request("a", context=2048)) as lease:
        assert lease.context_length == 2048
        assert [model.key for model in scheduler.loaded()] == ["a"]
        assert scheduler.reserved_bytes <= 4500


async def test_a_longer_context_that_a_busy_model_leaves_no_room_for_sends_nobody_away(make):
    scheduler = make(Script(weight_bytes=1000, cache_bytes_per_token=1), memory=lambda: 6000)
    async with await scheduler.lease(load_request("b", context=512)):
        for key in "ac":
            (await scheduler.lease(load_request(key, context=512))).release()
        with pytest.raises(OutOfMemory, match=r"requires 5096 bytes.*4096 tokens but only 4488 bytes"):
            await scheduler.lease(load_request("a", context=4096))
        assert [(model.key, model.requests) for model in sorted(scheduler.loaded(), key=lambda m: m.key)] == [
            ("a", 0),
            ("b", 1),
            ("c", 0),
        ]


async def test_a_request_without_a_context_gets_what_memory_allows_whatever_the_model_was_loaded_with(make):
    scheduler = make(Script(weight_bytes=1000, cache_bytes_per_token=1), memory=lambda: 100_000)
    async with await scheduler.lease(load_request(context=64)) as small:
        assert small.context_length == 64
        async with await scheduler.lease(load_request()) as lease:
            assert lease.context_length == 4096


async def test_a_request_without_a_context_is_served_with_the_one_there_is_when_memory_allows_no_longer_one(make):
    scheduler = make(Script(weight_bytes=1000, cache_bytes_per_token=1), memory=lambda: 2000)
    for _ in range(2):
        async with await scheduler.lease(load_request(context=512)):
            pass
        async with await scheduler.lease(load_request()) as lease:
            assert lease.context_length == 512


async def test_a_model_that_is_stopped_while_a_request_waits_for_room_beside_it_is_loaded_anew(make, monkeypatch):
    scheduler = make(
        Script(weight_bytes=1000, cache_bytes_per_token=1, replies=[Reply(tokens=[7])]), memory=lambda: 4500
    )
    for key in "ab":
        (await scheduler.lease(load_request(key, context=512))).release()
    first = scheduler._entries["a"]
    stop = scheduler._loader._stop

    async def stop_once_the_end_of_the_first_is_known(entry):
        await until(lambda: first.has_exited)
        await stop(entry)

    monkeypatch.setattr(scheduler._loader, "_stop", stop_once_the_end_of_the_first_is_known)
    waiting = asyncio.create_task(scheduler.lease(load_request("a", context=2048)))
    await asyncio.sleep(0)
    assert first.users == 1
    first.runner.process.kill()
    async with await waiting as lease:
        assert (await answer(lease, submit("1")))[0] == [7]
    assert scheduler.loaded()[0].requests == 0


async def test_two_models_share_the_cache_memory_and_never_more_than_there_is(make, tmp_path):
    log = tmp_path / "log"
    script = Script(weight_bytes=1000, cache_bytes_per_token=10, max_rows=8, log=str(log))
    scheduler = make(script, memory=lambda: 40_000)
    async with await scheduler.lease(load_request("a", context=512)):
        await until(lambda: received(log)[-1].get("cache_bytes") == 39_000)
        async with await scheduler.lease(load_request("b", context=512)):
            await until(lambda: len([m for m in received(log) if m["type"] == "limit"]) >= 3)
            assert scheduler.reserved_bytes <= 40_000
            assert all(model.reserved_bytes >= 6120 for model in scheduler.loaded())


async def test_what_a_round_of_drafts_takes_is_promised_with_the_weights(make):
    scheduler = make(Script(weight_bytes=40, round_bytes=25), memory=lambda: 100)
    async with await scheduler.lease(load_request("a", weight=40)):
        assert scheduler.reserved_bytes == 65
    await scheduler.unload("a")
    again = asyncio.create_task(scheduler.lease(load_request("a", weight=40)))
    await until(lambda: scheduler.reserved_bytes)
    # Known from the first load before the second says so.
    assert scheduler.reserved_bytes == 65
    (await asyncio.wait_for(again, 10)).release()
