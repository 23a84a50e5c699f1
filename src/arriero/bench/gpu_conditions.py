"""Whether a GPU is alone with what is being measured: how fast it copies just before, and who else is there."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass

import mlx.core as mx

from arriero.bench.gpu_kernels import copy_rate

SLOWER = 0.9
"""Of the first copy rate: below that something else is at work."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a part of a run found before it began."""

    copy: float
    """Bytes a second, read and written."""
    others: int | None
    """Other processes that have the GPU open; None where the driver's tool does not say."""

    def disturbed(self, first: float) -> str | None:
        """What speaks against a figure measured now, with `first` bytes a second as the copy rate of the run."""
        if self.copy < SLOWER * first:
            return f"copies ran at {self.copy / 1e9:.0f} GB/s, {first / 1e9:.0f} at the start"
        if self.others:
            return f"{self.others} other process{'es' if self.others > 1 else ''} had the GPU open"
        return None


def conditions() -> Conditions:
    """Of this moment."""
    copy = copy_rate()
    mx.clear_cache()
    return Conditions(copy, other_processes())


def other_processes() -> int | None:
    """Those that compute on the GPU beside this one; None where NVIDIA's tool is missing or does not name this one."""
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        found = {int(line) for line in done.stdout.split()}
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return len(found) - 1 if os.getpid() in found else None
