"""Damaged files of every kind that is read: refused by an error of ours, in little time and memory, or read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

KINDS = ("safetensors", "gguf", "manifest", "config", "modelfile", "index")


def check(folder: Path, first: int, count: int) -> None:
    command = [sys.executable, "-m", "tests.helpers.mutants", str(folder), str(first), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["failures"] == []
    for kind in KINDS:
        # Most damage is found; none of it would mean that nothing was damaged.
        assert found["outcomes"][f"{kind} refused"] > count / len(KINDS) / 4


@pytest.mark.skipif(sys.platform != "linux", reason="the limit on memory is Linux's")
def test_damaged_files_are_refused_or_read_and_nothing_else(tmp_path: Path) -> None:
    check(tmp_path, 0, 480)


@pytest.mark.skipif(sys.platform != "linux", reason="the limit on memory is Linux's")
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_thousand_damaged_files_are_refused_or_read_and_nothing_else(tmp_path: Path) -> None:
    check(tmp_path, 1_000, 10_000)
