"""Schedulers over scripted runners, closed at the end of each test, with a look at what they leave behind."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from arriero.runner.messages import Failed, Finished, SamplingOptions, Submit, Tokens
from arriero.scheduler import Lease, LoadRequest, Scheduler
from arriero.settings import Settings
from arriero.source import FolderSource
from tests.helpers.scripted_runner import Script, received, scripted_command

MakeScheduler = Callable[..., Scheduler]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[MakeScheduler]:
    """`make(script, **settings)`; `command=` for another runner. Nothing may be left when the test ends."""
    made: list[Scheduler] = []
    before = {child.pid for child in psutil.Process().children(recursive=True)}

    def maker(script: Script | None = None, command: list[str] | None = None, **changes: Any) -> Scheduler:
        options = {name: changes.pop(name) for name in ("memory", "scratch_bytes", "clock") if name in changes}
        options.setdefault("scratch_bytes", 0)
        settings = replace(Settings.from_environ({"ARRIERO_HOME": str(tmp_path)}), **changes)
        chosen = command or scripted_command(tmp_path, script or Script(), f"script{len(made)}.json")
        scheduler = Scheduler(settings, runner_command=chosen, **options)
        made.append(scheduler)
        return scheduler

    yield maker
    for scheduler in made:
        await asyncio.wait_for(scheduler.close(), 20)
        assert scheduler.reserved_bytes == 0
        assert scheduler.loaded() == []
    gc.collect()
    left = {child.pid for child in psutil.Process().children(recursive=True)} - before
    assert not left, f"runners {left} are left"


def load_request(key: str = "a", weight: int = 1000, context: int = 0, name: str = "") -> LoadRequest:
    return LoadRequest(
        key=key, name=name or f"model-{key}", source=FolderSource(key), weight_bytes=weight, context_length=context
    )


def submit(row: str, tokens: list[int] | None = None, count: int = -1) -> Submit:
    return Submit(id=row, tokens=tokens or [1, 2, 3], max_tokens=count, stop_tokens=[], sampling=SamplingOptions())


async def answer(lease: Lease, request: Submit) -> tuple[list[int], Finished | Failed]:
    """All tokens of a request and its end."""
    tokens: list[int] = []
    async for message in lease.generate(request):
        if isinstance(message, Tokens):
            tokens += message.tokens
        elif isinstance(message, Finished | Failed):
            return tokens, message
    raise AssertionError("the row did not end")


async def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait until something holds."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


def starts(log: Path) -> list[int]:
    """Process ids of the runners that have started with this log."""
    return [message["pid"] for message in received(log) if message["type"] == "start"]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
