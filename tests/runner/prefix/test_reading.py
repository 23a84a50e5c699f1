"""Files of stored prefixes are read beside the array thread, and only the row that needs them waits."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from arriero.runner.engine import Engine
from arriero.runner.prefix import reading as reading_module
from arriero.runner.prefix.disk import DiskTier
from arriero.runner.prefix.record import Contents, read_contents
from tests.helpers.engine_runs import collect, make_engine, plain_loop, run, submit
from tests.helpers.tiny_model import VOCAB, TinyModel

PLENTY = 1 << 30
MODEL = TinyModel("fs", context=2048)
PROMPT = random.Random(1).choices(range(VOCAB), k=300)
FOUND = 296
"""Where a window was kept, a little before the prompt's end."""


class Reads:
    """Notes who reads, and holds them up until it is told to let them go."""

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.go = threading.Event()

    def __call__(self, path: Path) -> Contents:
        self.threads.append(threading.current_thread().name)
        assert self.go.wait(20)
        return read_contents(path)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    found = Reads()
    monkeypatch.setattr(reading_module, "read_contents", found)
    return found


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A folder with the prefix of PROMPT."""
    engine = make_engine(MODEL, prefix_bytes=PLENTY, disk=DiskTier(tmp_path / "m", PLENTY))
    engine.submit(submit("a", PROMPT, 5))
    run(engine)
    engine.close()
    return tmp_path / "m"


def restarted(folder: Path) -> Engine:
    return make_engine(MODEL, prefix_bytes=PLENTY, disk=DiskTier(folder, PLENTY))


def test_the_array_thread_reads_no_file(stored: Path, reads: Reads) -> None:
    reads.go.set()
    engine = restarted(stored)
    engine.submit(submit("a", PROMPT, 5))
    reply = run(engine)["a"]
    assert reply.tokens == plain_loop(MODEL, PROMPT, 5)
    assert reply.end.cached_tokens == FOUND
    assert reads.threads
    assert set(reads.threads) == {"prefix-reader_0"}
    engine.close()


def test_other_rows_run_while_a_file_is_read(stored: Path, reads: Reads) -> None:
    engine = restarted(stored)
    engine.submit(submit("reads", PROMPT, 5))
    engine.submit(submit("runs", PROMPT[::-1], 5))
    replies: dict = {}
    for _ in range(60):
        engine.step()
        collect(engine, replies)
    assert replies["runs"].tokens == plain_loop(MODEL, PROMPT[::-1], 5)
    assert "reads" not in replies
    assert engine.busy
    reads.go.set()
    run(engine, replies)
    assert replies["reads"].tokens == plain_loop(MODEL, PROMPT, 5)
    assert replies["reads"].end.cached_tokens == FOUND
    engine.close()


def test_a_row_that_waits_for_a_file_can_be_cancelled(stored: Path, reads: Reads) -> None:
    engine = restarted(stored)
    engine.submit(submit("a", PROMPT, 5))
    engine.step()
    engine.cancel("a")
    assert collect(engine)["a"].reason == "cancelled"
    assert not engine.busy
    reads.go.set()
    engine.submit(submit("b", PROMPT, 5))
    assert run(engine)["b"].tokens == plain_loop(MODEL, PROMPT, 5)
    engine.close()


def test_a_file_that_is_found_damaged_in_the_background_is_removed(
    stored: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = restarted(stored)
    for path in stored.iterdir():
        data = bytearray(path.read_bytes())
        data[-100] ^= 1
        path.write_bytes(data)
    engine.submit(submit("a", PROMPT, 5))
    reply = run(engine)["a"]
    assert reply.tokens == plain_loop(MODEL, PROMPT, 5)
    assert reply.end.cached_tokens < FOUND
    assert "is not used and removed" in caplog.text
    engine.close()


def test_what_is_in_memory_already_is_not_read(stored: Path, reads: Reads) -> None:
    reads.go.set()
    engine = restarted(stored)
    engine.submit(submit("a", PROMPT, 5))
    assert run(engine)["a"].end.cached_tokens == FOUND
    assert reads.threads
    reads.threads.clear()
    engine.submit(submit("b", PROMPT, 5))
    assert run(engine)["b"].end.cached_tokens == 299
    assert not reads.threads
    engine.close()
