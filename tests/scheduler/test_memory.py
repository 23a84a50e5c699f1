"""The machine's memory, from the outside."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from arriero.scheduler import memory


@pytest.fixture(autouse=True)
def _fresh():
    memory.gpu_memory.cache_clear()
    yield
    memory.gpu_memory.cache_clear()


def test_a_control_groups_limit_counts_where_it_is_less(monkeypatch, tmp_path: Path):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "CGROUP_LIMITS", (limit, tmp_path / "missing"))
    total = psutil.virtual_memory().total
    assert memory.host_memory() == total
    limit.write_text("max\n")
    assert memory.host_memory() == total
    limit.write_text("1048576\n")
    assert memory.host_memory() == 1048576


def test_without_mlx_for_cuda_the_machines_memory_counts(monkeypatch):
    monkeypatch.setattr(memory, "CUDA_PACKAGES", ("no-such-distribution",))
    assert memory.gpu_memory() == 0
    assert memory.machine_memory() == int(memory.host_memory() * memory.SHARE)


def test_with_mlx_for_cuda_the_first_gpus_memory_counts(monkeypatch):
    monkeypatch.setattr(memory, "CUDA_PACKAGES", ("mlx",))
    monkeypatch.setattr(memory, "_NVIDIA_SMI", ("printf", "81920\n40960\n"))
    assert memory.gpu_memory() == 81920 << 20
    assert memory.machine_memory() == int((81920 << 20) * memory.SHARE)


@pytest.mark.parametrize("command", [("false",), ("/nonexistent/smi",), ("printf", "N/A")])
def test_a_gpu_that_cannot_be_asked_is_a_warning(monkeypatch, caplog, command):
    monkeypatch.setattr(memory, "CUDA_PACKAGES", ("mlx",))
    monkeypatch.setattr(memory, "_NVIDIA_SMI", command)
    assert memory.gpu_memory() == 0
    assert "ARRIERO_MEMORY_LIMIT" in caplog.text
