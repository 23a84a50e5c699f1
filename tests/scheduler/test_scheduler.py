"""Leases, keep-alive, queue, progress, unloading: the scheduler over runners that play scripts."""

from __future__ import annotations

import asyncio
import math

import pytest

from arriero.errors import InvalidRequest, LoadError, ServerBusy
from arriero.runner.messages import Finished
from arriero.scheduler.runner import Runner
from tests.helpers.scripted_runner import Reply, Script
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


async def test_what_drafting_did_is_remembered_when_its_runner_is_gone(make):
    scheduler = make(Script(replies=[Reply(tokens=[7], rounds=4)]))
    for row in "12":
        async with await scheduler.lease(load_request()) as lease:
            await answer(lease, submit(row))
        [(key, used)] = scheduler.drafting().items()
        assert key == ("model-a", "lookup")
        assert (used.rounds, used.drafted, used.accepted) == (4 * int(row), 12 * int(row), 8 * int(row))
        await scheduler.unload("a")
        assert scheduler.loaded() == []
        assert scheduler.drafting() == {key: used}


async def test_runners_tell_their_figures_and_silent_ones_hold_nobody_up(make, monkeypatch):
    scheduler = make(Script(weight_bytes=77))
    assert await scheduler.statuses(5) == []
    async with await scheduler.lease(load_request()):
        [(name, status)] = await scheduler.statuses(5)
        assert (name, status.memory_bytes) == ("model-a", 77)
        monkeypatch.setattr(Runner, "status", lambda _: asyncio.sleep(60))
        assert await scheduler.statuses(0.05) == []
