"""What happens when runners crash, hang, shout or refuse, and when clients leave."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from arriero import errors
from arriero.errors import LoadError, RunnerCrashed
from arriero.runner.messages import Failed, Tokens
from arriero.scheduler import LoadRequest, error_of, process, runner
from arriero.source import FolderSource
from tests.helpers.scripted_runner import Reply, Script, received, scripted_command
from tests.scheduler.conftest import alive, answer, load_request, starts, submit, until

ROOT = Path(__file__).parents[2]


def kinds(log: Path, kind: str) -> list[str]:
    """Ids of the messages of one kind that the runner received."""
    return [message["id"] for message in received(log) if message["type"] == kind]


async def test_a_crash_is_one_error_per_request_in_flight_with_the_last_words(make, tmp_path):
    log = tmp_path / "log"
    crashing = Reply(tokens=[1, 2, 3], delay=0.02, crash_after=2, crash_line="CUDA error: unspecified")
    slow = Reply(tokens=[5], endless=True, delay=0.01)
    scheduler = make(Script(replies=[slow, slow, crashing], log=str(log)))
    async with await scheduler.lease(load_request()) as lease:
        tasks = [asyncio.create_task(answer(lease, submit(str(row)))) for row in range(3)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, RunnerCrashed) for result in results)
    assert all("CUDA error: unspecified" in str(result) for result in results)
    assert scheduler.loaded() == []
    async with await scheduler.lease(load_request()) as lease:
        async for message in lease.generate(submit("next")):
            if isinstance(message, Tokens):
                break
    assert len(starts(log)) == 2


async def test_tokens_said_before_a_crash_still_arrive(make):
    scheduler = make(Script(replies=[Reply(tokens=[4, 5, 6], crash_after=2)]))
    tokens = []
    async with await scheduler.lease(load_request()) as lease:
        messages = lease.generate(submit("1"))
        while len(tokens) < 2:
            message = await anext(messages)
            tokens += message.tokens if isinstance(message, Tokens) else []
        with pytest.raises(RunnerCrashed):
            await anext(messages)
    assert tokens == [4, 5]


async def test_a_killed_runner_names_the_signal_and_is_replaced(make, tmp_path):
    log = tmp_path / "log"
    scheduler = make(Script(replies=[Reply(tokens=[5], endless=True, delay=0.01)], log=str(log)))
    async with await scheduler.lease(load_request()) as lease:
        reply = asyncio.create_task(answer(lease, submit("1")))
        await until(lambda: kinds(log, "submit"))
        os.kill(starts(log)[0], signal.SIGKILL)
        with pytest.raises(RunnerCrashed, match="SIGKILL"):
            await reply


async def test_a_runner_that_gives_no_sign_of_life_is_killed_and_replaced(make, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "QUIET_SECONDS", 0.05)
    monkeypatch.setattr(runner, "ANSWER_SECONDS", 0.3)
    log = tmp_path / "log"
    scheduler = make(Script(replies=[Reply(tokens=[5], endless=True, delay=0.01), Reply(tokens=[6])], log=str(log)))
    async with await scheduler.lease(load_request()) as lease:
        reply = asyncio.create_task(answer(lease, submit("1")))
        await until(lambda: kinds(log, "submit"))
        os.kill(starts(log)[0], signal.SIGSTOP)
        with pytest.raises(RunnerCrashed, match=r"no sign of life for 0\.3 s; it was killed"):
            await reply
    async with await scheduler.lease(load_request()) as lease:
        await answer(lease, submit("2", count=1))
    assert len(starts(log)) == 2


async def test_a_runner_that_computes_for_long_and_says_nothing_is_left_alone(make, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "QUIET_SECONDS", 0.05)
    monkeypatch.setattr(runner, "ANSWER_SECONDS", 0.2)
    scheduler = make(Script(replies=[Reply(tokens=[5], delay=0.4)]))
    async with await scheduler.lease(load_request()) as lease:
        assert (await answer(lease, submit("1")))[0] == [5]


async def test_a_runner_that_dies_while_idle_is_replaced_before_the_next_request_is_sent(make, tmp_path):
    log = tmp_path / "log"
    scheduler = make(Script(replies=[Reply(tokens=[5])], log=str(log)))
    async with await scheduler.lease(load_request()) as lease:
        process = lease._runner.process
    os.kill(starts(log)[0], signal.SIGKILL)
    await until(lambda: process.returncode is not None)
    async with await scheduler.lease(load_request()) as lease:
        assert (await answer(lease, submit("1")))[0] == [5]


async def test_a_failed_row_is_a_message_and_the_runner_lives(make, tmp_path):
    log = tmp_path / "log"
    failing = Reply(tokens=[1, 2], fail_after=1, error="OutOfMemory", message="needs 2 but has 1")
    scheduler = make(Script(replies=[failing, Reply(tokens=[9])], log=str(log)))
    async with await scheduler.lease(load_request()) as lease:
        tokens, end = await answer(lease, submit("1"))
        assert isinstance(end, Failed)
        assert isinstance(error_of(end), errors.OutOfMemory)
        assert tokens == [1]
        assert (await answer(lease, submit("2")))[0] == [9]
    assert len(starts(log)) == 1


def test_a_failure_of_an_unknown_class_is_a_plain_error():
    error = error_of(Failed("1", "SystemExit", "what"))
    assert type(error) is errors.ArrieroError
    assert str(error) == "what"


@pytest.mark.parametrize("kind", ["CheckpointError", "UnsupportedArchitecture", "OutOfMemory"])
async def test_a_load_error_reaches_every_waiter_with_its_class_the_models_name_and_text(make, kind):
    scheduler = make(Script(load_error=kind, load_message="tensor x is missing", load_delay=0.05))
    tasks = [asyncio.create_task(scheduler.lease(load_request())) for _ in range(3)]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [(type(result).__name__, str(result)) for result in results] == [(kind, "model-a: tensor x is missing")] * 3
    assert scheduler.loaded() == []
    assert scheduler.reserved_bytes == 0


async def test_a_crash_while_loading_quotes_the_last_line(make):
    scheduler = make(Script(load_crash="Illegal instruction"))
    with pytest.raises(LoadError, match="ended while loading: Illegal instruction"):
        await scheduler.lease(load_request())


async def test_a_load_without_progress_is_given_up(make, tmp_path):
    log = tmp_path / "log"
    scheduler = make(Script(load_hang=True, log=str(log)), load_timeout=0.5)
    with pytest.raises(LoadError, match=r"no progress for 0\.5 s"):
        await scheduler.lease(load_request())
    assert not alive(starts(log)[0])


async def test_a_load_with_progress_may_take_longer_than_the_timeout(make):
    scheduler = make(Script(load_delay=0.25, load_steps=5), load_timeout=1.0)
    (await scheduler.lease(load_request())).release()


async def test_a_command_that_cannot_start_is_a_load_error(make):
    scheduler = make(command=["/nonexistent/runner"])
    with pytest.raises(LoadError, match="cannot be started"):
        await scheduler.lease(load_request())


async def test_a_program_that_is_no_runner_is_a_load_error_with_its_words(make):
    scheduler = make(command=[sys.executable, "-c", "import sys; sys.exit('not a runner')"])
    with pytest.raises(LoadError, match="not a runner"):
        await scheduler.lease(load_request())


async def test_a_very_long_line_on_standard_error_does_not_hold_the_runner_up(make, caplog):
    scheduler = make(Script(stderr="x" * 3_000_000 + "\nlast words\n", replies=[Reply(tokens=[5], crash_after=1)]))
    async with await scheduler.lease(load_request()) as lease:
        with pytest.raises(RunnerCrashed, match="scripted crash"):
            await answer(lease, submit("1"))


async def test_the_last_line_in_a_message_is_at_most_256_bytes(make):
    scheduler = make(Script(load_crash="é" * 1000))
    with pytest.raises(LoadError) as caught:
        await scheduler.lease(load_request())
    assert 100 < str(caught.value).count("é") <= 128


async def test_a_runner_that_ignores_the_interrupt_is_killed(make, tmp_path, monkeypatch):
    monkeypatch.setattr(process, "STOP_SECONDS", 0.3)
    log = tmp_path / "log"
    scheduler = make(Script(ignore_interrupt=True, log=str(log)))
    (await scheduler.lease(load_request())).release()
    await scheduler.unload("a")
    assert not alive(starts(log)[0])


async def test_a_runner_that_swallows_an_interrupt_while_it_starts_is_stopped_at_once(make, tmp_path):
    """R08: Python raises SIGINT inside whatever import is running, where it may be lost."""
    up = tmp_path / "up"
    code = f"import signal, time; signal.signal(2, signal.SIG_IGN); open({str(up)!r}, 'w').close(); time.sleep(60)"
    scheduler = make(command=[sys.executable, "-c", code])
    lease = asyncio.create_task(scheduler.lease(load_request()))
    await until(up.exists)
    started = time.monotonic()
    await scheduler.unload("a")
    assert time.monotonic() - started < 3.0
    with pytest.raises(LoadError, match="unloaded while it was loading"):
        await lease
    assert scheduler.reserved_bytes == 0


async def test_stopping_a_load_whose_runner_does_not_read_its_configuration_leaves_no_process(make):
    scheduler = make(command=[sys.executable, "-c", "import time; time.sleep(60)"])
    request = LoadRequest(key="a", name="a", source=FolderSource("x" * 1_000_000), weight_bytes=1)
    others = set(psutil.Process().children())
    lease = asyncio.create_task(scheduler.lease(request))
    await until(lambda: set(psutil.Process().children()) - others)
    children = set(psutil.Process().children()) - others
    await asyncio.sleep(0.05)
    await scheduler.unload("a")
    assert not [child for child in children if child.is_running()]
    with pytest.raises(LoadError, match="unloaded while it was loading"):
        await lease


@pytest.mark.parametrize("leave", ["close", "release", "cancel"])
async def test_a_client_that_leaves_cancels_its_row(make, tmp_path, leave):
    """R04: by whatever way the reader goes."""
    log = tmp_path / "log"
    scheduler = make(Script(replies=[Reply(tokens=[5], endless=True, delay=0.01)], log=str(log)))
    lease = await scheduler.lease(load_request())
    if leave == "close":
        messages = lease.submit(submit("1"))
        await anext(messages)
        messages.close()
    elif leave == "release":
        lease.submit(submit("1"))
        lease.release()
    else:
        task = asyncio.create_task(answer(lease, submit("1")))
        await until(lambda: kinds(log, "submit"))
        task.cancel()
        await asyncio.wait([task])
    await until(lambda: kinds(log, "cancel") == ["1"])
    lease.release()
    await until(lambda: scheduler.loaded()[0].requests == 0)


async def test_of_ten_queued_clients_the_eight_that_leave_never_run(make, tmp_path):
    """R05: one long row, ten behind it, eight leave; two more run, in their order."""
    log = tmp_path / "log"
    script = Script(max_rows=1, replies=[Reply(tokens=[5], endless=True, delay=0.01), Reply(tokens=[6])], log=str(log))
    scheduler = make(script)
    done = []

    async def client(row: str) -> None:
        async with await scheduler.lease(load_request()) as lease:
            _, end = await answer(lease, submit(row))
            done.append((row, end.reason))

    first = asyncio.create_task(client("first"))
    await until(lambda: kinds(log, "submit"))
    clients = {str(i): asyncio.create_task(client(str(i))) for i in range(10)}
    await until(lambda: len(kinds(log, "submit")) == 11)
    staying = ["3", "7"]
    for row, task in clients.items():
        if row not in staying:
            task.cancel()
    await until(lambda: len(kinds(log, "cancel")) == 8)
    first.cancel()
    await asyncio.wait([first, *clients.values()])
    assert done == [(row, "stop") for row in staying]


async def test_200_random_disconnects_leave_no_row_and_one_runner(make, tmp_path):
    log = tmp_path / "log"
    script = Script(max_rows=4, replies=[Reply(tokens=[5] * 40, delay=0.002)], log=str(log))
    scheduler = make(script)
    rng = random.Random(0)

    async def client(row: int) -> None:
        async with await scheduler.lease(load_request()) as lease:
            await answer(lease, submit(str(row)))

    for burst in range(20):
        tasks = [asyncio.create_task(client(10 * burst + i)) for i in range(10)]
        for task in tasks:
            await asyncio.sleep(rng.random() * 0.01)
            rng.choice(tasks).cancel()
            task.cancel() if rng.random() < 0.8 else None
        await asyncio.wait(tasks)
    async with await scheduler.lease(load_request()) as lease:
        assert (await answer(lease, submit("last")))[0] == [5] * 40
        runner = lease._runner
        await until(lambda: not runner.streams)
        status = await runner.status()
        assert (status.rows_running, status.rows_waiting) == (0, 0)
    assert scheduler.loaded()[0].requests == 0
    assert len(starts(log)) == 1
    gc.collect()
    assert len(asyncio.all_tasks()) < 12


def test_no_runner_survives_a_killed_server(tmp_path):
    log = tmp_path / "log"
    command = scripted_command(tmp_path, Script(replies=[Reply(tokens=[5], endless=True, delay=0.01)], log=str(log)))
    program = textwrap.dedent(
        f"""
        import asyncio
        from arriero.scheduler import Scheduler
        from arriero.settings import Settings
        from tests.scheduler.conftest import answer, load_request, submit

        async def main():
            scheduler = Scheduler(Settings.from_environ({{}}), runner_command={command!r}, scratch_bytes=0)
            async with await scheduler.lease(load_request()) as lease:
                await answer(lease, submit("1"))

        asyncio.run(main())
        """
    )
    server = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    try:
        _wait(lambda: kinds(log, "submit"))
        (runner,) = starts(log)
        assert alive(runner)
    finally:
        server.kill()
        server.wait()
    _wait(lambda: not alive(runner))


def test_the_scheduler_imports_no_array_library():
    program = "import sys, arriero.scheduler; sys.exit('mlx' in sys.modules or 'mlx.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def _wait(condition, seconds=15.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)
