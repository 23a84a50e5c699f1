"""The scheduler over real runner processes: around a tiny model, and with tiny checkpoints of real architectures."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

import mlx.core as mx
import pytest

from arriero.errors import CheckpointError, LoadError
from arriero.runner.messages import Failed, Finished, PrefillProgress, SamplingOptions, Submit
from arriero.scheduler import LoadRequest, error_of
from arriero.source import FolderSource
from tests.helpers.drafts import target_of, with_head
from tests.helpers.engine_runs import plain_loop
from tests.helpers.tiny_model import TinyModel
from tests.helpers.tiny_runner import tiny_command, tiny_source
from tests.scheduler.conftest import answer, until

GOLDENS = Path(__file__).parents[1] / "model" / "goldens"
REAL = [sys.executable, "-m", "arriero.runner"]
GREEDY = SamplingOptions(temperature=0.0)


def request(source: FolderSource, key: str = "tiny") -> LoadRequest:
    return LoadRequest(key=key, name=key, source=source, weight_bytes=100_000)


def submit(row: str, tokens: list[int], count: int = 30) -> Submit:
    return Submit(id=row, tokens=tokens, max_tokens=count, stop_tokens=[], sampling=GREEDY)


async def test_sixteen_clients_at_once_get_the_tokens_of_each_alone(make, tmp_path):
    model = TinyModel()
    expected = {row: plain_loop(model, [1 + row, 2, 3, row], 20 + row) for row in range(16)}
    scheduler = make(command=tiny_command())
    source = tiny_source(tmp_path)

    async def client(row: int) -> list[int]:
        async with await scheduler.lease(request(source)) as lease:
            return (await answer(lease, submit(str(row), [1 + row, 2, 3, row], 20 + row)))[0]

    replies = await asyncio.gather(*(client(row) for row in range(16)))
    assert dict(enumerate(replies)) == expected


async def test_a_failing_forward_is_an_error_of_its_request_and_the_process_lives(make, tmp_path):
    scheduler = make(command=tiny_command())
    async with await scheduler.lease(request(tiny_source(tmp_path, bad_token=66))) as lease:
        _, end = await answer(lease, submit("1", [1, 66, 3]))
        assert isinstance(end, Failed)
        assert "injected fault" in end.message
        assert "Traceback" not in end.message
        tokens, end = await answer(lease, submit("2", [1, 2, 3]))
        assert isinstance(end, Finished)
        assert len(tokens) == 30


async def test_a_forward_without_memory_is_an_out_of_memory_error(make, tmp_path):
    scheduler = make(command=tiny_command())
    async with await scheduler.lease(request(tiny_source(tmp_path, bad_token=66, error="MemoryError"))) as lease:
        _, end = await answer(lease, submit("1", [1, 66, 3]))
        assert type(error_of(end)).__name__ == "OutOfMemory"


async def test_a_lost_device_ends_the_process_after_its_rows_and_the_next_request_starts_another(make, tmp_path):
    scheduler = make(command=tiny_command())
    source = tiny_source(tmp_path, bad_token=66, poison=True)
    async with await scheduler.lease(request(source)) as lease:
        _, end = await answer(lease, submit("1", [1, 66, 3]))
        assert isinstance(end, Failed)
        await until(lambda: not scheduler.loaded())
        assert "the device is lost" in lease._runner.process.ending
    async with await scheduler.lease(request(source)) as lease:
        assert len((await answer(lease, submit("2", [1, 2, 3])))[0]) == 30


async def test_a_status_request_is_answered_during_a_long_forward(make, tmp_path):
    scheduler = make(command=tiny_command())
    async with await scheduler.lease(request(tiny_source(tmp_path, seconds=0.6))) as lease:
        messages = lease.submit(submit("1", [1, 2, 3], 3))
        await anext(messages)
        started = time.monotonic()
        status = await lease._runner.status()
        assert time.monotonic() - started < 0.3
        assert status.memory_bytes > 0
        messages.close()


async def test_cancelling_takes_effect_within_two_steps(make, tmp_path):
    scheduler = make(command=tiny_command())
    async with await scheduler.lease(request(tiny_source(tmp_path, seconds=0.05))) as lease:
        messages = lease.submit(submit("1", [1, 2, 3], 500))
        while isinstance(await anext(messages), PrefillProgress):
            pass
        messages.close()
        started = time.monotonic()
        await until(lambda: not lease._runner.streams)
        assert time.monotonic() - started < 0.5
        await until(lambda: True)
        status = await lease._runner.status()
        assert status.tokens_generated < 10


async def test_unexpected_errors_of_a_load_are_told_without_a_traceback_and_logged_with_one(make, tmp_path, caplog):
    caplog.set_level("INFO")
    scheduler = make(command=tiny_command())
    with pytest.raises(LoadError, match="cannot be loaded: TypeError") as caught:
        await scheduler.lease(request(tiny_source(tmp_path, no_such_argument=1)))
    assert "Traceback" not in str(caught.value)
    assert "Traceback" in caplog.text


async def test_a_checkpoint_that_is_not_there_is_a_checkpoint_error(make, tmp_path):
    scheduler = make(command=REAL)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        await scheduler.lease(request(FolderSource(str(tmp_path / "nothing"))))


async def test_an_unknown_dtype_is_a_load_error_that_lists_the_known_ones(make, tmp_path):
    scheduler = make(command=tiny_command(), dtype="float8")
    with pytest.raises(LoadError, match="float32, bfloat16, float16"):
        await scheduler.lease(request(tiny_source(tmp_path)))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
async def test_a_real_runner_answers_from_a_real_architecture(make, name):
    scheduler = make(command=REAL, dtype="float32")
    async with await scheduler.lease(request(FolderSource(str(GOLDENS / name)), name)) as lease:
        assert lease.ready.dtype == "float32"
        assert lease.ready.weight_bytes > 0
        first, _ = await answer(lease, submit("1", [5, 6, 7, 8], 24))
        again, _ = await answer(lease, submit("2", [5, 6, 7, 8], 24))
        assert len(first) == 24
        assert first == again


@pytest.mark.parametrize("kind", ["", "off"])
async def test_a_listing_says_what_drafting_did(make, kind):
    scheduler = make(command=REAL, dtype="float32", speculation=kind)
    async with await scheduler.lease(request(FolderSource(str(GOLDENS / "llama")), "llama")) as lease:
        for row in ("1", "2"):
            await answer(lease, submit(row, [5, 6, 7, 8] * 5, 60))
        found = scheduler.loaded()[0].drafting
        if kind == "off":
            assert found is None
        else:
            assert found.kind == "lookup"
            assert 0 <= found.accepted <= found.drafted


async def test_a_head_in_the_checkpoint_drafts_in_a_real_runner(make, tmp_path):
    both = with_head("mtp_qwen3_5")
    (tmp_path / "config.json").write_text(json.dumps(both.config))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), both.tensors)
    scheduler = make(command=REAL, dtype="float32")
    async with await scheduler.lease(request(FolderSource(str(tmp_path)), "headed")) as lease:
        tokens, end = await answer(lease, submit("1", [5, 6, 7, 8], 40))
        assert end.speculation.kind == "mtp"
        assert tokens == plain_loop(target_of("mtp_qwen3_5"), [5, 6, 7, 8], 40)
