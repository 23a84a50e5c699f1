"""How much memory this machine has for models, found without loading an array library."""

from __future__ import annotations

import logging
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

log = logging.getLogger(__name__)

SHARE = 0.75 if sys.platform == "darwin" else 0.9
"""Part that runners may be promised; on a Mac about what the GPU may keep resident."""

CUDA_PACKAGES = ("mlx-cuda-13", "mlx-cuda-12", "mlx-cuda")
"""Distributions that put MLX's arrays on an NVIDIA GPU, which has memory of its own."""

CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))

_NVIDIA_SMI = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")


def machine_memory() -> int:
    """Bytes that runners may be promised: a share of the memory of the device that they run on.

    That is the first GPU's with MLX for CUDA, else the machine's, or its control group's where that is less.
    """
    return int((gpu_memory() or host_memory()) * SHARE)


def host_memory() -> int:
    """Bytes of main memory that this process may use."""
    limits = [int(psutil.virtual_memory().total)]
    for path in CGROUP_LIMITS:
        text = path.read_text().strip() if path.is_file() else ""
        if text.isdigit():
            limits.append(int(text))
    return min(limits)


@cache
def gpu_memory() -> int:
    """Bytes of the first NVIDIA GPU's memory when MLX runs there; 0 otherwise."""
    if not any(_installed(name) for name in CUDA_PACKAGES):
        return 0
    try:
        reply = subprocess.run(_NVIDIA_SMI, capture_output=True, text=True, timeout=10, check=True).stdout
        return int(reply.split()[0]) << 20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        log.warning("the GPU's memory cannot be read (%s); set ARRIERO_MEMORY_LIMIT if models don't fit", error)
        return 0


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True
