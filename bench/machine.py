"""What measurements depend on beside the programs: how fast memory is read, who else computes, which machine it is."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent


@cache
def _reader() -> tuple[Path, tempfile.TemporaryDirectory[str]]:
    """`read_bandwidth.c`, compiled for this processor; the folder lives as long as the process."""
    folder = tempfile.TemporaryDirectory(prefix="read-bandwidth-")
    program = Path(folder.name) / "read_bandwidth"
    compiler = os.environ.get("CC", "cc")
    command = [compiler, "-O3", "-march=native", "-pthread", str(HERE / "read_bandwidth.c"), "-o", str(program)]
    subprocess.run(command, check=True)
    return program, folder


def read_bandwidth(threads: int, megabytes: int = 512, seconds: float = 0.3) -> float:
    """Bytes per second that `threads` threads read from memory, the best of several patterns and page sizes."""
    command = [str(_reader()[0]), str(threads), str(megabytes), str(seconds)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return 1e9 * max(float(line.split()[-1]) for line in lines)


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many processes spin beside the measurement."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def facts() -> dict[str, str | float]:
    """The processor, how many of it we may use, and what ran in the last minute."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"processor": name, "processors": usable, "load": round(os.getloadavg()[0], 2)}
