"""Rows of files that are fetched beside the device's work: the same bytes, each read once, wrong guesses harmless."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arriero.formats.mapped import map_file, read_here_and_there, read_soon
from arriero.model.architectures import load_model
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Batch, ReadsAhead
from arriero.model.layers.row_fetch import FEW, FileRows
from arriero.source import FolderSource
from tests.helpers import flash_next as fn
from tests.helpers.engine_runs import make_engine, run, submit
from tests.helpers.forward import Rows, whole

STARTS = np.array([0, 300, 310, 1000])
CODES = np.random.default_rng(0).integers(0, 256, (1000, 6)).astype(np.uint8)
HALVES = np.random.default_rng(1).normal(size=(1000, 3)).astype(ml_dtypes.bfloat16)


def rows() -> FileRows:
    columns = [[column[a:b] for a, b in pairwise(STARTS.tolist())] for column in (CODES, HALVES)]
    return FileRows(columns, STARTS)


def some(count: int, seed: int) -> np.ndarray:
    return np.sort(np.random.default_rng(seed).choice(1000, count, replace=False))


def check(taken: Sequence[np.ndarray], numbers: np.ndarray) -> None:
    np.testing.assert_array_equal(taken[0], CODES[numbers])
    np.testing.assert_array_equal(taken[1], HALVES[numbers])
    assert taken[1].dtype == ml_dtypes.bfloat16


class Watched(FileRows):
    """Counts the rows that are copied, and by whom."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.copied: list[int] = []
        self.threads: set[str] = set()

    def _copy(self, numbers: np.ndarray, outs: Sequence[np.ndarray]) -> None:
        self.copied += numbers.tolist()
        self.threads.add(threading.current_thread().name)
        super()._copy(numbers, outs)


@given(st.sets(st.integers(0, 999)), st.sets(st.integers(0, 999)) | st.none())
def test_rows_are_those_of_the_file_whatever_was_expected(wanted: set[int], expected: set[int] | None) -> None:
    found = rows()
    if expected is not None:
        found.expect(np.array(sorted(expected), np.int64))
    numbers = np.array(sorted(wanted), np.int64)
    check(found.take(numbers), numbers)
    check(found.take(numbers), numbers)


@pytest.mark.parametrize("count", [1, FEW, FEW + 1, 500, 1000])
def test_many_rows_are_copied_by_several_threads_and_few_by_the_caller(count: int) -> None:
    found = Watched(rows()._columns, STARTS)
    numbers = some(count, 3)
    check(found.take(numbers), numbers)
    assert sorted(found.copied) == numbers.tolist()
    mine = threading.current_thread().name in found.threads
    assert mine == (count <= FEW)


def test_what_was_expected_is_read_once_and_not_by_the_caller() -> None:
    found = Watched(rows()._columns, STARTS)
    numbers = some(40, 4)
    found.expect(numbers)
    check(found.take(numbers[::3]), numbers[::3])
    assert sorted(found.copied) == numbers.tolist()
    assert threading.current_thread().name not in found.threads


def test_what_is_on_its_way_is_not_begun_again() -> None:
    found = Watched(rows()._columns, STARTS)
    numbers = some(200, 5)
    found.expect(numbers)
    found.expect(numbers[10:50])
    check(found.take(numbers), numbers)
    assert len(found.copied) == 200


def test_a_newer_guess_replaces_an_older_one() -> None:
    found = Watched(rows()._columns, STARTS)
    first, second = np.arange(100), np.arange(500, 600)
    found.expect(first)
    found.expect(second)
    assert found._expected is not None
    found._expected.wait()
    found.copied.clear()
    check(found.take(second), second)
    assert found.copied == []
    check(found.take(first), first)
    assert sorted(found.copied) == first.tolist()


def test_what_fails_beside_fails_in_the_open() -> None:
    class Broken(FileRows):
        def _copy(self, numbers: np.ndarray, outs: Sequence[np.ndarray]) -> None:
            raise OSError("the disk is gone")

    found = Broken(rows()._columns, STARTS)
    found.expect(np.arange(5))
    with pytest.raises(OSError, match="the disk is gone"):
        found.take(np.arange(5))


def test_the_system_can_be_asked_for_rows_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(bytes(range(256)) * 256)
    view = map_file(tmp_path / "bytes")[5000:45000].reshape(400, 100)
    assert read_here_and_there(view)
    assert read_soon(view, np.array([0, 3, 399]))
    assert view[399, 99] == (44999) % 256
    assert not read_soon(view.copy(), np.array([0]))


class TestModel:
    """The golden model with its table in a file."""

    IDS = fn.golden_ids()

    @pytest.fixture
    def model(self, tmp_path: Path) -> Any:
        stored, _ = fn.TABLES["nvfp4 per shard"](*[fn.published(fn.golden_tensors())] * 2)
        fn.folder(tmp_path, stored)
        model: Any = load_model(Checkpoint.open(FolderSource(str(tmp_path))), mx.float32)
        table = model.layers[1].ngrams.table
        table.files = Watched(table.files._columns, table.starts)
        return model

    def test_ids_that_the_host_knows_start_the_reading_before_the_first_layer(
        self, model: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        files = model.layers[1].ngrams.table.files
        expected = whole(model, self.IDS)
        begun: list[int] = []
        original = type(model.embedding).__call__

        def embedding(self: Any, tokens: mx.array) -> mx.array:
            begun.append(0 if files._expected is None else files._expected.numbers.size)
            return original(self, tokens)

        monkeypatch.setattr(type(model.embedding), "__call__", embedding)
        batch = Rows(model).batch([self.IDS])
        known = Batch.of(np.array(self.IDS, np.int32), batch.spans)
        np.testing.assert_array_equal(np.array(model.logits(model.forward(known).final)), expected)
        assert begun[0] > 100
        assert files._expected is None

    def test_the_engine_fetches_the_next_chunk_beside_this_one(self, model: Any) -> None:
        assert isinstance(model, ReadsAhead)
        files = model.layers[1].ngrams.table.files
        engine = make_engine(model, prefill_chunk=10)
        engine.submit(submit("a", self.IDS, 3))
        engine.step()
        assert files._expected is not None
        coming = files._expected.numbers
        hash_ = model.layers[1].ngrams.hash
        np.testing.assert_array_equal(coming, np.unique(hash_(np.array(self.IDS[8:20]))))
        files._expected.wait()
        files.copied.clear()
        files.threads.clear()
        engine.step()
        # All that the second chunk takes was there; what is read now is the third's.
        third = np.unique(hash_(np.array(self.IDS[18:30])))
        files._expected.wait()
        assert sorted(files.copied) == third.tolist()
        assert not any("MainThread" in name for name in files.threads)
        engine.close()

    @pytest.mark.parametrize("chunk", [1, 3, 10, 64])
    @pytest.mark.parametrize("ahead", [False, True])
    def test_replies_are_those_of_a_model_whose_table_is_loaded(
        self, model: Any, chunk: int, ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("ARRIERO_RESIDENT_TABLES", "1")
        resident = load_model(Checkpoint.open(FolderSource(str(tmp_path))), mx.float32)
        prompts = {"a": self.IDS, "b": self.IDS[7:19], "c": self.IDS[::-1]}
        found = []
        for each in (model, resident):
            engine = make_engine(each, ahead, prefill_chunk=chunk)
            for row, ids in prompts.items():
                engine.submit(submit(row, ids, 6))
            found.append({row: reply.tokens for row, reply in run(engine).items()})
        assert found[0] == found[1]
        assert all(found[0].values())

    def test_a_cancelled_row_leaves_only_a_wrong_guess(self, model: Any) -> None:
        engine = make_engine(model, prefill_chunk=10)
        engine.submit(submit("a", self.IDS, 3))
        engine.step()
        engine.cancel("a")
        engine.submit(submit("b", self.IDS[5:17], 4))
        reply = run(engine)["b"]
        alone = make_engine(model, prefill_chunk=64)
        alone.submit(submit("b", self.IDS[5:17], 4))
        assert reply.tokens == run(alone)["b"].tokens
