"""Whether a GPU is alone with what is being measured: how fast it copies just before, and what others hold of it."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

import mlx.core as mx

from arriero.bench.gpu_kernels import copy_rate

SLOWER = 0.9
"""Of the first copy rate: below that something else is at work."""
OWN_BYTES = 3 << 30
"""Of a process beside its arrays: the driver's context, machine code, libraries' workspaces."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a part of a run found before it began."""

    copy: float
    """Bytes a second, read and written."""
    beside_bytes: int | None
    """Of the GPU's memory beside this process' arrays; None where the driver's tool does not say."""

    def disturbed(self, first: float) -> str | None:
        """What speaks against a figure measured now, with `first` bytes a second as the copy rate of the run."""
        if self.copy < SLOWER * first:
            return f"copies ran at {self.copy / 1e9:.0f} GB/s, {first / 1e9:.0f} at the start"
        if self.beside_bytes is not None and self.beside_bytes > OWN_BYTES:
            return (
                f"{self.beside_bytes / (1 << 30):.1f} GiB of the GPU's memory were in use beside this process' arrays"
            )
        return None


def conditions() -> Conditions:
    """Of this moment."""
    copy = copy_rate()
    mx.clear_cache()
    used = used_bytes()
    return Conditions(copy, None if used is None else max(used - mx.get_active_memory(), 0))


def used_bytes() -> int | None:
    """Of the GPU's memory, by all processes; None where NVIDIA's tool is not there or says nothing."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return int(done.stdout.strip()) << 20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
