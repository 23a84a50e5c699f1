"""How many threads the pool takes: affinity, cgroup quotas of both versions, the environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from arriero_cpu import _native


def write(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


V1 = "sys/fs/cgroup/cpu"


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 0),
        ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, 0),
        ({"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 2),
        ({"sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
        ({"sys/fs/cgroup/cpu.max": "5000 100000\n"}, 1),
        ({"sys/fs/cgroup/cpu.max": "nonsense\n"}, 0),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "300000 100000\n"}, 3),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
                "sys/fs/cgroup/a/cpu.max": "400000 100000\n",
                "sys/fs/cgroup/cpu.max": "900000 100000\n",
            },
            4,
        ),
        ({"proc/self/cgroup": "0::/../host/only\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 3),
        ({f"{V1}/cpu.cfs_quota_us": "-1\n", f"{V1}/cpu.cfs_period_us": "100000\n"}, 0),
        ({f"{V1}/cpu.cfs_quota_us": "350000\n", f"{V1}/cpu.cfs_period_us": "100000\n"}, 4),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/docker/x\n4:memory:/\n",
                f"{V1}/docker/x/cpu.cfs_quota_us": "100000\n",
                f"{V1}/docker/x/cpu.cfs_period_us": "50000\n",
            },
            2,
        ),
    ],
)
def test_the_smallest_quota_on_the_way_up_counts(tmp_path: Path, files: dict[str, str], cores: int) -> None:
    assert _native.quota_cores(write(tmp_path, files)) == cores


def child(env: dict[str, str], setup: str = "") -> str:
    script = f"import os; {setup}\nimport arriero_cpu; print(arriero_cpu.threads()); arriero_cpu.probe()"
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | env, check=False, capture_output=True, text=True
    )
    return done.stdout + done.stderr


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity here")
def test_a_process_tied_to_one_core_gets_one_thread() -> None:
    core = min(os.sched_getaffinity(0))
    env = {"ARRIERO_THREADS": ""}
    assert child(env, f"os.sched_setaffinity(0, [{core}])").strip() == "1"


@pytest.mark.parametrize("value", ["0", "-2", "two", "3x", "99999999999999999999"])
def test_a_bad_number_of_threads_is_refused_by_name(value: str) -> None:
    assert f"ARRIERO_THREADS is '{value}'; it must be a whole number" in child({"ARRIERO_THREADS": value})
    assert "ARRIERO_SPIN_US" in child({"ARRIERO_SPIN_US": f"x{value}"})
