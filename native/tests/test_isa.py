"""Every instruction set that this machine has, and what keeps a better one from running on a lesser machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import arriero_cpu as cpu
import pytest

HERE = Path(__file__).parent
X86 = ("avx512-vnni", "avx512-plain", "avx2-vnni", "avx2-plain", "portable")


def run(isa: str, *command: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"ARRIERO_CPU_ISA": isa, "ARRIERO_THREADS": "2"}
    return subprocess.run([sys.executable, *command], env=env, check=False, capture_output=True, text=True)


def named(isa: str) -> str:
    done = run(isa, "-c", "import arriero_cpu; print(arriero_cpu.isa())")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("isa", "files"),
    [
        ("avx2-plain", [""]),
        ("portable", [""]),
        ("avx512-plain", ["test_products.py"]),
        ("avx2-vnni", ["test_products.py"]),
    ],
)
@pytest.mark.skipif("ARRIERO_CPU_ISA" in os.environ, reason="already forced")
def test_a_forced_set_passes_the_kernel_tests(isa: str, files: list[str]) -> None:
    if named(isa) != isa:
        pytest.skip(f"no {isa} here")
    paths = [str(HERE / f) for f in files]
    done = run(isa, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "not forced", *paths)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.skipif("ARRIERO_CPU_ISA" in os.environ, reason="already forced")
def test_a_name_without_extension_picks_the_sets_best_form() -> None:
    assert named(cpu.isa().partition("-")[0]) == cpu.isa()
    assert named("") == cpu.isa()
    assert named("portable") == "portable"


def test_probe_refuses_a_set_that_is_not_there() -> None:
    done = run("avx3", "-c", "import arriero_cpu; arriero_cpu.probe()")
    assert done.returncode
    assert "ARRIERO_CPU_ISA is 'avx3'; this machine has" in done.stderr
