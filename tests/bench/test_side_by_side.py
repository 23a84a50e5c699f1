"""The measurements against other programs: what is computed from their figures, and that ours runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench import peers
from bench.machine import busy
from bench.peers import Figures
from bench.side_by_side import LLAMA, speeds, totals
from tools.random_model import Shape, write

TINY = Shape(layers=1, hidden=64, heads=4, kv_heads=2, head_dim=16, inner=96, vocab=4096, context=96)


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "tiny.gguf"
    write(path, TINY, "Q4_1", "Q8_0")
    return str(path)


def test_ratios_and_shares_are_medians_of_those_of_the_rounds() -> None:
    rounds: list[dict[str, Any]] = [
        {"bandwidth": band, "speeds": {("ours", 64): Figures(*ours, 10), (LLAMA, 64): Figures(*theirs, 8)}}
        for band, ours, theirs in [(100, (4, 2), (2, 1)), (50, (9, 4), (3, 1)), (200, (40, 30), (4, 2))]
    ]
    ours, theirs = speeds(rounds)
    assert (ours["prefill"], ours["decode"], ours["prefill_ratio"], ours["decode_ratio"]) == (9, 4, 3, 4)
    assert ours["share"] == 0.8
    assert (theirs["prefill_ratio"], theirs["decode_ratio"], theirs["share"]) == (1, 1, 0.08)


def test_without_llama_cpp_there_are_no_ratios() -> None:
    (line,) = speeds([{"bandwidth": 100, "speeds": {("ours", 64): Figures(4, 2, 10)}}])
    assert (line["prefill_ratio"], line["decode_ratio"], line["share"]) == (None, None, 0.2)


def test_totals_are_compared_with_one_row_of_the_same_round() -> None:
    lines = totals([{"rows": {1: 10.0, 8: 40.0}}, {"rows": {1: 20.0, 8: 100.0}}, {"rows": {1: 5.0, 8: 15.0}}])
    assert [(line["rows"], line["total"], line["ratio"]) for line in lines] == [(1, 10, 1), (8, 40, 4)]
    assert totals([{}]) == []


def test_our_engine_is_measured_and_a_context_is_cut_to_the_models(model: str) -> None:
    found = peers.run([*peers._arriero(model, "float32"), "--prompts", "8", "500", "--tokens", "6", "--runs", "1"], 1)
    assert [(speed["prompt"], speed["rows"]) for speed in found["speeds"]] == [(8, 1), (90, 1)]
    assert all(speed[kind] > 0 for speed in found["speeds"] for kind in ("prefill", "decode", "total"))
    assert found["dtype"] == "float32"


def test_several_rows_are_measured_together(model: str) -> None:
    found = peers.arriero_rows(model, "bfloat16:int8", [1, 3], tokens=6, runs=1, threads=1)
    assert set(found) == {1, 3}
    assert all(total > 0 for total in found.values())


def test_a_tied_table_is_read_for_every_token(model: str) -> None:
    weights = TINY.vocab * TINY.hidden * 34 // 32
    weights += sum(rows * columns for _, rows, columns in TINY.matrices()) * 20 // 32
    assert peers.file_read_bytes(model) == weights + 3 * TINY.hidden * 4


def test_what_spins_beside_a_measurement_ends_with_it() -> None:
    before = {child.pid for child in psutil.Process().children()}
    with busy(2):
        spinning = [child for child in psutil.Process().children() if child.pid not in before]
        assert [Path(child.exe()).resolve() for child in spinning] == [Path(sys.executable).resolve()] * 2
    assert {child.pid for child in psutil.Process().children()} <= before
