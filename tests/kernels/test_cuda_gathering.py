"""Whether blocks of a launch may wait for one another."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from arriero.kernels.cuda import gathering


@pytest.fixture(autouse=True)
def pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the control daemon of MPS would leave its pipe."""
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    monkeypatch.delenv(gathering.CHAIN, raising=False)
    gathering._shared.cache_clear()
    return tmp_path / "control"


def test_they_may_where_nothing_else_shares_the_multiprocessors() -> None:
    assert gathering.wanted()


def test_they_may_not_beside_mps_and_the_log_says_so(pipe: Path, caplog: pytest.LogCaptureFixture) -> None:
    pipe.touch()
    with caplog.at_level(logging.INFO, logger=gathering.__name__):
        assert not gathering.wanted()
        assert not gathering.wanted()
    assert [record.getMessage() for record in caplog.records if str(pipe) in record.getMessage()] == [
        f"MPS shares the GPU ({pipe}), so no blocks wait for one another; ARRIERO_CUDA_CHAIN=1 lets them"
    ]


@pytest.mark.parametrize(("asked", "may"), [("1", True), ("0", False)])
def test_the_setting_decides_beside_mps_and_without_it(
    pipe: Path, monkeypatch: pytest.MonkeyPatch, asked: str, may: bool
) -> None:
    monkeypatch.setenv(gathering.CHAIN, asked)
    assert gathering.wanted() is may
    pipe.touch()
    gathering._shared.cache_clear()
    assert gathering.wanted() is may
