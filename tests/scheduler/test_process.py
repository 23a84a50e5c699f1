"""A runner's process: its log in ours, its last words, its end."""

from __future__ import annotations

import asyncio
import logging
import sys

import psutil

from arriero.runner.messages import RunnerConfig
from arriero.scheduler import process as process_module
from arriero.scheduler.process import RunnerProcess
from arriero.source import FolderSource, LayersSource

CONFIG = RunnerConfig(source=FolderSource("x"), endpoint="ipc://x")


async def start(program: str, config: RunnerConfig = CONFIG) -> RunnerProcess:
    return await RunnerProcess.start([sys.executable, "-c", f"import sys\n{program}"], config, "name")


async def test_lines_are_logged_at_the_level_that_they_name(caplog):
    caplog.set_level(logging.DEBUG)
    lines = ["WARNING x: careful", "INFO x: fine", "plain words"]
    await (await start(f"sys.stderr.write({chr(10).join(lines)!r})")).wait()
    records = [(record.levelname, record.message) for record in caplog.records if record.name == "arriero.runner.name"]
    assert records == [("WARNING", "x: careful"), ("INFO", "x: fine"), ("INFO", "plain words")]


async def test_information_is_not_taken_for_last_words():
    process = await start("sys.exit('ValueError: bad\\nINFO x: good bye\\n')")
    assert await process.wait() == 1
    assert process.ending == "ValueError: bad (exit status 1)"


async def test_without_words_the_status_is_told():
    process = await start("sys.exit(7)")
    await process.wait()
    assert process.ending == "exit status 7"


async def test_a_kill_is_told_with_its_likely_reason():
    process = await start("sys.stdin.read(); import time; time.sleep(60)")
    process.kill()
    await process.wait()
    assert "SIGKILL" in process.ending
    assert "memory" in process.ending


async def test_any_number_of_tasks_may_wait_for_the_end():
    process = await start("sys.stdin.read(); sys.exit(3)")
    assert await asyncio.gather(*(process.wait() for _ in range(20))) == [3] * 20
    await process.stop()


async def test_a_grandchild_that_holds_the_log_open_does_not_hide_the_end(monkeypatch, tmp_path):
    monkeypatch.setattr(process_module, "LOG_SECONDS", 0.2)
    pid = tmp_path / "pid"
    program = (
        "import pathlib, subprocess; child = subprocess.Popen(['sleep', '60']);"
        f"pathlib.Path({str(pid)!r}).write_text(str(child.pid)); sys.exit('last words')"
    )
    process = await start(program)
    assert await process.wait() == 1
    grandchild = psutil.Process(int(pid.read_text()))
    assert grandchild.is_running()
    assert process.last_line == "last words"
    grandchild.kill()
    async with asyncio.timeout(10):
        while not process._process._transport.is_closing():
            await asyncio.sleep(0.01)


async def test_a_configuration_longer_than_any_argument_may_be_arrives_whole():
    source = LayersSource(tensors={f"model.layers.{i}.weight": "/blobs/" + "0" * 100 for i in range(5000)}, files={})
    process = await start("sys.exit(len(sys.stdin.read()) > 600_000)", RunnerConfig(source=source, endpoint="ipc://x"))
    assert await process.wait() == 1
