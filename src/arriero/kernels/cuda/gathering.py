"""What launches count in whose blocks wait for one another."""

from __future__ import annotations

import logging
import os
from functools import cache
from pathlib import Path

import mlx.core as mx

from arriero.kernels.cuda.source import argument

log = logging.getLogger(__name__)

CHAIN = "ARRIERO_CUDA_CHAIN"
"""The setting: with 0 no blocks wait for one another, and each part is a launch of its own or not divided; that is so
without it, too, where MPS runs."""


def wanted() -> bool:
    """Whether blocks may wait: all of a launch must stand on the device at once, which nothing else may keep busy."""
    asked = os.environ.get(CHAIN, "").strip()
    return asked != "0" if asked else not _shared()


@cache
def _shared() -> bool:
    """Whether MPS lets other processes' blocks stand beside ours, as its control daemon's pipe says."""
    pipe = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps") / "control"
    found = pipe.exists()
    if found:
        log.info("MPS shares the GPU (%s), so no blocks wait for one another; %s=1 lets them", pipe, CHAIN)
    return found


@cache
def gathered(blocks: int) -> mx.array:
    """Counts of 64 bits of the blocks that have arrived, for launches of so many that meet up to three times."""
    made = argument(mx.zeros((8,), mx.uint32))
    mx.eval(made)
    return made
