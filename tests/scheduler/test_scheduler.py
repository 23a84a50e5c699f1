"""Leases, keep-alive, room, progress: the scheduler over runners that play scripts."""

from __future__ import annotations

import asyncio
import math

import pytest

from arriero.errors import InvalidRequest, LoadError, OutOfMemory, ServerBusy
from arriero.runner.messages import Finished
from tests.helpers.scripted_runner import Reply, Script, received
from tests.scheduler.conftest import alive, answer, load_request, starts, submit, until


async def test_a_lease_loads_the_model_and_gives_its_tokens(make):
    scheduler = make(Script(replies=[Reply(tokens=[7, 8, 9])]))
    async with await scheduler.lease(load_request()) as lease:
        assert lease.ready.architecture == "scripted"
        assert lease.context_length == 4096
        assert lease.load_ns > 0
        tokens, end = await answer(lease, submit("1"))
    assert tokens == [7, 8, 9]
    assert isinstance(end, Finished)
    assert end.reason == "stop"


async def test_a_second_lease_uses_the_same_runner_without_waiting(make, tmp_path):
    log = tmp_path / "log"
    scheduler = make(Script(replies=[Reply(tokens=[7])], log=str(log)))
    for row in "12":
        async with await scheduler.lease(load_request()) as lease:
            await answer(lease, submit(row))
    assert lease.load_ns == 0
    assert len(starts(log)) == 1


async def test_concurrent_requests_share_one_load(make, tmp_path):
    log = tmp_path / "log"
    scheduler = make(Script(replies=[Reply(tokens=[7, 8])], load_delay=0.1, max_rows=4, log=str(log)))

    async def one(row: int) -> list[int]:
        async with await scheduler.lease(load_request()) as lease:
            return (await answer(lease, submit(str(row))))[0]

    assert await asyncio.gather(*(one(row) for row in range(16))) == [[7, 8]] * 16
    assert len(starts(log)) == 1


async def test_a_request_id_that_is_running_is_refused(make):
    scheduler = make(Script(replies=[Reply(tokens=[7], endless=True, delay=0.01)]))
    async with await scheduler.lease(load_request()) as lease:
        lease.submit(submit("1"))
        with pytest.raises(InvalidRequest, match="already running"):
            lease.submit(submit("1"))


async def test_a_request_that_cannot_be_encoded_leaves_no_stream_behind(make):
    scheduler = make(Script(cache_bytes_per_token=1))
    async with await scheduler.lease(load_request()) as lease:
        with pytest.raises(OverflowError):
            lease.submit(submit("1", [1 << 80]))
        assert lease._runner.cache_in_use == 0


async def test_an_idle_model_leaves_after_its_keep_alive(make, tmp_path):
    log = tmp_path / "log"
    scheduler = make(Script(log=str(log)), keep_alive=0.2)
    async with await scheduler.lease(load_request()):
        pass
    assert [model.state for model in scheduler.loaded()] == ["ready"]
    await until(lambda: not scheduler.loaded())
    await until(lambda: not alive(starts(log)[0]))


async def test_the_keep_alive_of_a_request_replaces_the_models_for_good(make):
    scheduler = make(clock=lambda: 1000.0)
    async with await scheduler.lease(load_request(), keep_alive=math.inf):
        pass
    assert scheduler.loaded()[0].expires_at == math.inf
    async with await scheduler.lease(load_request(), keep_alive=60.0):
        pass
    async with await scheduler.lease(load_request()):
        pass
    assert scheduler.loaded()[0].expires_at == 1060.0


async def test_the_listing_counts_the_idle_time_of_a_model_in_use_from_now(make):
    now = [1000.0]
    scheduler = make(clock=lambda: now[0], keep_alive=60.0)
    (await scheduler.lease(load_request())).release()
    now[0] = 1030.0
    assert scheduler.loaded()[0].expires_at == 1060.0
    async with await scheduler.lease(load_request()):
        assert scheduler.loaded()[0].expires_at == 1090.0


async def test_a_keep_alive_of_zero_unloads_after_the_last_request(make):
    scheduler = make(Script(replies=[Reply(tokens=[7])]))
    async with await scheduler.lease(load_request()) as first:
        async with await scheduler.lease(load_request(), keep_alive=0.0):
            pass
        assert await answer(first, submit("1"))
        assert scheduler.loaded()
    await until(lambda: not scheduler.loaded())


async def test_a_request_during_the_idle_time_stops_the_clock(make):
    scheduler = make(keep_alive=0.3)
    async with await scheduler.lease(load_request()):
        pass
    async with await scheduler.lease(load_request()):
        await asyncio.sleep(0.5)
        assert scheduler.loaded()[0].requests == 1
    assert scheduler.loaded()


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


async def test_a_full_queue_answers_busy_at_once_in_ollamas_words(make):
    scheduler = make(Script(load_hang=True), max_queue=2)
    waiting = [asyncio.create_task(scheduler.lease(load_request())) for _ in range(2)]
    await asyncio.sleep(0.05)
    with pytest.raises(ServerBusy, match=r"server busy, please try again\.  maximum pending requests exceeded"):
        await asyncio.wait_for(scheduler.lease(load_request()), 1)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)


async def test_rows_that_wait_in_a_runner_count_for_the_queue(make):
    scheduler = make(Script(replies=[Reply(tokens=[7], endless=True, delay=0.01)], max_rows=1), max_queue=2)
    leases = [await scheduler.lease(load_request()) for _ in range(3)]
    with pytest.raises(ServerBusy):
        await scheduler.lease(load_request())
    leases.pop().release()
    (await scheduler.lease(load_request())).release()
    for lease in leases:
        lease.release()


async def test_a_slow_load_does_not_hold_up_another_model(make):
    scheduler = make(Script(load_delay=0.4, load_steps=2, replies=[Reply(tokens=[7])]))
    async with await scheduler.lease(load_request("a")) as lease:
        slow = asyncio.create_task(scheduler.lease(load_request("b")))
        await asyncio.sleep(0.1)
        tokens, _ = await asyncio.wait_for(answer(lease, submit("1")), 1)
        assert tokens == [7]
        assert not slow.done()
        (await slow).release()


async def test_progress_of_a_load_can_be_watched(make):
    scheduler = make(Script(load_delay=0.05, load_steps=4))
    lease = asyncio.create_task(scheduler.lease(load_request()))
    await asyncio.sleep(0)
    events = [(event.done, event.total) async for event in scheduler.progress("a")]
    assert events[-1] == (4, 4)
    assert len(events) >= 4
    (await lease).release()
    assert [event async for event in scheduler.progress("a")] == []


async def test_the_listing_shows_models_that_load(make):
    scheduler = make(Script(load_delay=0.1, load_steps=5, weight_bytes=1234))
    lease = asyncio.create_task(scheduler.lease(load_request(weight=1234)))
    await until(lambda: scheduler.loaded() and 0 < scheduler.loaded()[0].loaded_fraction < 1)
    assert scheduler.loaded()[0].state == "loading"
    async with await lease:
        model = scheduler.loaded()[0]
        assert (model.state, model.loaded_fraction, model.weight_bytes) == ("ready", 1.0, 1234)
        assert (model.name, model.device, model.context_length) == ("model-a", "cpu (script)", 4096)


async def test_a_client_that_leaves_does_not_cancel_the_load_it_began(make):
    scheduler = make(Script(load_delay=0.2), keep_alive=30.0)
    client = asyncio.create_task(scheduler.lease(load_request()))
    await until(lambda: scheduler.loaded() and scheduler.loaded()[0].state == "loading")
    client.cancel()
    await asyncio.wait([client])
    await until(lambda: scheduler.loaded()[0].state == "ready")
    async with await scheduler.lease(load_request()) as lease:
        assert lease.load_ns == 0


async def test_a_model_whose_only_client_leaves_just_as_it_is_ready_begins_its_idle_time(make):
    scheduler = make(Script(), keep_alive=0.05)
    client = asyncio.create_task(scheduler.lease(load_request()))
    rest = scheduler._loader._on_ready

    def leave_now(entry):
        rest(entry)
        client.cancel()

    scheduler._loader._on_ready = leave_now
    await asyncio.wait([client])
    assert client.cancelled()
    await until(lambda: not scheduler.loaded())


async def test_a_load_that_nobody_waits_for_any_more_gives_up_its_place_in_the_queue(make):
    scheduler = make(Script(weight_bytes=60), memory=lambda: 100)
    async with await scheduler.lease(load_request("a", weight=60)):
        client = asyncio.create_task(scheduler.lease(load_request("b", weight=60)))
        await until(lambda: len(scheduler.loaded()) == 2)
        client.cancel()
        await asyncio.wait([client])
        await until(lambda: [model.key for model in scheduler.loaded()] == ["a"])


async def test_a_load_that_turns_out_too_large_and_that_nobody_waits_for_sends_no_busy_model_away(make):
    scheduler = make(Script(weight_bytes=60, load_delay=0.1, load_steps=2), memory=lambda: 100)
    async with await scheduler.lease(load_request("a", weight=60)):
        client = asyncio.create_task(scheduler.lease(load_request("b", weight=10)))
        await until(lambda: any(model.state == "loading" for model in scheduler.loaded()))
        client.cancel()
        await until(lambda: len(scheduler.loaded()) == 1)
        (await scheduler.lease(load_request("a", weight=60))).release()


@pytest.mark.parametrize("how", ["leave", "unload"])
async def test_a_request_that_comes_just_after_a_load_was_given_up_begins_another(make, how):
    scheduler = make(Script(weight_bytes=60), memory=lambda: 100)

    async def late(turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        (await scheduler.lease(load_request("b", weight=60))).release()

    for turns in range(1, 4):
        busy = await scheduler.lease(load_request("a", weight=60))
        first = asyncio.create_task(scheduler.lease(load_request("b", weight=60)))
        await until(lambda: len(scheduler.loaded()) == 2)
        second = asyncio.create_task(late(turns))
        if how == "leave":
            first.cancel()
        else:
            asyncio.create_task(scheduler.unload("b"))  # noqa: RUF006  (its end is the load's)
        await asyncio.sleep(0.01)
        busy.release()
        _, late_result = await asyncio.wait_for(asyncio.gather(first, second, return_exceptions=True), 10)
        assert late_result is None


async def test_unloading_an_idle_model_returns_when_its_process_is_gone(make, tmp_path):
    log = tmp_path / "log"
    scheduler = make(Script(log=str(log)))
    async with await scheduler.lease(load_request()):
        pass
    assert await scheduler.unload("a")
    assert not alive(starts(log)[0])
    assert not await scheduler.unload("a")


async def test_unloading_a_model_that_is_on_its_way_out_returns_when_its_process_is_gone(make, tmp_path):
    log = tmp_path / "log"
    scheduler = make(Script(log=str(log)))
    (await scheduler.lease(load_request(), keep_alive=0.0)).release()
    assert "a" not in scheduler._entries
    assert await scheduler.unload("a")
    assert not alive(starts(log)[0])


async def test_unloading_a_busy_model_lets_its_requests_end(make):
    scheduler = make(Script(replies=[Reply(tokens=[1, 2, 3], delay=0.05)]))
    async with await scheduler.lease(load_request()) as lease:
        reply = asyncio.create_task(answer(lease, submit("1")))
        await asyncio.sleep(0.05)
        assert await scheduler.unload("a")
        assert (await reply)[0] == [1, 2, 3]
    await until(lambda: not scheduler.loaded())


@pytest.mark.parametrize("hang", [True, False])
async def test_unloading_during_a_load_ends_it_and_a_new_load_begins_afresh(make, tmp_path, hang):
    """R08: reload during load: the first runner is gone, the ledger counts one model."""
    log = tmp_path / "log"
    scheduler = make(Script(load_hang=hang, load_delay=0.2, load_steps=3, weight_bytes=500, log=str(log)))
    client = asyncio.create_task(scheduler.lease(load_request(weight=500)))
    await until(lambda: starts(log))
    await scheduler.unload("a")
    with pytest.raises(LoadError, match="unloaded while it was loading"):
        await client
    assert not alive(starts(log)[0])
    assert scheduler.reserved_bytes == 0
    again = asyncio.create_task(scheduler.lease(load_request(weight=500)))
    await until(lambda: len(starts(log)) == 2)
    assert scheduler.reserved_bytes == 500
    if hang:
        again.cancel()
        await asyncio.wait([again])
    else:
        (await again).release()


async def test_unloading_a_model_whose_load_has_not_begun_wakes_its_waiters_and_leaves_nothing(make):
    scheduler = make(Script(replies=[Reply(tokens=[7])]))
    client = asyncio.create_task(scheduler.lease(load_request()))
    await asyncio.sleep(0)
    assert await scheduler.unload("a")
    with pytest.raises(LoadError, match="unloaded while it was loading"):
        await asyncio.wait_for(client, 5)
    assert scheduler.loaded() == []
    async with await asyncio.wait_for(scheduler.lease(load_request()), 10) as lease:
        assert (await answer(lease, submit("1")))[0] == [7]


async def test_unloading_twice_during_a_load_still_wakes_its_waiters(make, tmp_path):
    log = tmp_path / "log"
    scheduler = make(Script(load_hang=True, log=str(log)))
    client = asyncio.create_task(scheduler.lease(load_request()))
    await until(lambda: starts(log))
    entry = scheduler._entries["a"]
    first = asyncio.create_task(scheduler.unload("a"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert entry.load is not None
    entry.load.cancel()
    await first
    with pytest.raises(LoadError):
        await asyncio.wait_for(client, 5)


async def test_closing_during_a_load_leaves_nothing(make, tmp_path):
    log = tmp_path / "log"
    scheduler = make(Script(load_hang=True, log=str(log)))
    client = asyncio.create_task(scheduler.lease(load_request()))
    await until(lambda: starts(log))
    await scheduler.close()
    with pytest.raises(LoadError):
        await client
    assert not alive(starts(log)[0])
    with pytest.raises(LoadError, match="shutting down"):
        await scheduler.lease(load_request())
